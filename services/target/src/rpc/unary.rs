//! The unary twin of a Rounds stream: one frame in, and the replies to its items out.

use std::collections::HashSet;

use eyrie_wire::v1::{
    Committed, Features, TargetFrame, TargetItem, TargetOut, TargetReply, target_item::Op, target_out::Body,
};
use eyrie_wire::{Reason, refuse};
use tokio::sync::mpsc;
use tonic::Status;

use super::{Service, hello};
use crate::engine::{Command, Ending, Life, Replies, Sender, StreamId};

/// Items of one call at most.
const MAX_ITEMS: usize = 64;
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
        let boot = hello::check(&self.state, frame.hello)?;
        let stream = self.new_stream();
        let (frames, mut receiver) = mpsc::channel(REPLY_FRAMES);
        let replies = Replies { frames, ending: Ending::default() };
        let mut open = Unanswered::of(&frame.items)?;
        self.tell(Command::Attach { stream, boot, life: Life::Unary, replies }).await?;
        let _detach = Detach { engine: self.engine.clone(), stream };
        self.tell(Command::Items { stream, items: frame.items }).await?;
        let mut outs = Vec::new();
        while !open.is_empty() {
            let reply = tokio::select! {
                biased;
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

/// The sequences whose item is still to be answered.
struct Unanswered(HashSet<u64>);

impl Unanswered {
    /// Up to [`MAX_ITEMS`], one item a sequence: a second one could depend on the reply to the first.
    fn of(items: &[TargetItem]) -> Result<Self, Status> {
        if items.len() > MAX_ITEMS {
            let message = format!("a unary round may hold {MAX_ITEMS} items, given {}", items.len());
            return Err(refuse(Reason::InvalidArgument, message));
        }
        let mut seen = HashSet::new();
        if let Some(item) = items.iter().find(|item| !seen.insert(item.seq)) {
            let message = format!("a unary round may hold one item a sequence, given two of {}", item.seq);
            return Err(refuse(Reason::InvalidArgument, message));
        }
        // A Revoke has no answer of its own.
        let answered = items.iter().filter(|item| !matches!(item.op, Some(Op::Revoke(_))));
        Ok(Self(answered.map(|item| item.seq).collect()))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Strikes the item that `out` is the last reply to.
    fn strike(&mut self, out: &TargetOut) {
        let more_follow = matches!(
            out.body,
            Some(Body::Committed(Committed { last: false, .. }))
                | Some(Body::Features(Features { fetched: false, .. }))
                | None
        );
        if !more_follow {
            self.0.remove(&out.seq);
        }
    }
}
