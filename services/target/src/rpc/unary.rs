//! The unary twin of a Rounds stream: one frame in, and the replies to its items out.

use std::collections::HashMap;

use eyrie_wire::v1::{
    Committed, Features, TargetFrame, TargetItem, TargetOut, TargetReply, target_item::Op, target_out::Body,
};
use tokio::sync::mpsc;
use tonic::Status;

use super::{Service, hello};
use crate::engine::{Command, Ending, Life, Replies, Sender, StreamId};

/// Reply frames that may wait; they are taken at once.
const REPLY_FRAMES: usize = 64;

/// Ends the short stream when the call does, even if the caller goes away first.
struct Detach {
    engine: Sender<Command>,
    stream: StreamId,
}

impl Drop for Detach {
    fn drop(&mut self) {
        let _ = self.engine.post(Command::Detach(self.stream));
    }
}

impl Service {
    /// Answers one frame. Sequences stay for later calls with the same boot id.
    pub(super) async fn answer(&self, frame: TargetFrame) -> Result<TargetReply, Status> {
        let boot = hello::check(&self.state, frame.hello.as_ref())?;
        let stream = self.new_stream();
        let (frames, mut receiver) = mpsc::channel(REPLY_FRAMES);
        let replies = Replies { frames, ending: Ending::default() };
        let mut open = Unanswered::of(&frame.items);
        self.tell(Command::Attach { stream, boot, life: Life::Unary, replies }).await?;
        let _detach = Detach { engine: self.engine.clone(), stream };
        self.tell(Command::Items { stream, items: frame.items }).await?;
        let mut outs = Vec::new();
        while !open.is_empty() {
            let reply = tokio::select! {
                reply = receiver.recv() => reply,
                () = self.drain.stopped() => None,
            };
            let reply = reply.ok_or_else(|| self.engine_gone())?;
            reply.outs.iter().for_each(|out| open.strike(out));
            outs.extend(reply.outs);
        }
        Ok(TargetReply { hello: Some(hello::answer(&self.state, boot)), outs })
    }
}

/// How many items of each sequence are still to be answered.
struct Unanswered(HashMap<u64, usize>);

impl Unanswered {
    fn of(items: &[TargetItem]) -> Self {
        let mut open = HashMap::new();
        // A Revoke has no answer of its own.
        for item in items.iter().filter(|item| !matches!(item.op, Some(Op::Revoke(_)))) {
            *open.entry(item.seq).or_default() += 1;
        }
        Self(open)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Counts a reply that is its item's last.
    fn strike(&mut self, out: &TargetOut) {
        let more_follow = matches!(
            out.body,
            Some(Body::Committed(Committed { last: false, .. }))
                | Some(Body::Features(Features { fetched: false, .. }))
                | None
        );
        if more_follow {
            return;
        }
        if let Some(count) = self.0.get_mut(&out.seq) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&out.seq);
            }
        }
    }
}
