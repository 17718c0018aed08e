//! The link's task: connect, pump frames both ways until the stream breaks, back off, again.

use std::sync::Arc;
use std::time::Duration;

use eyrie_service::Drain;
use eyrie_wire::{Reason, reason_of};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tonic::Streaming;

use super::peer::{Connection, Peer};
use super::{CLOSES, RECENT_CLOSES, Shared, State};

const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_LAST: Duration = Duration::from_secs(1);
/// For a draft that is not attached to the target, which may never be.
const BACKOFF_APART: Duration = Duration::from_secs(4);
/// A frame is closed at this size (bytes, estimated), far below the largest message.
const FRAME_BYTES: usize = 4 << 20;
/// Items of a frame at most: the target refuses longer frames.
const FRAME_ITEMS: usize = 1024;
/// A peer that stays silent this long after a missed deadline gets a new stream.
const SUSPECT_LIMIT: Duration = Duration::from_secs(30);

pub(super) async fn run<P: Peer>(
    shared: Arc<Shared<P>>,
    peer: P,
    mut items: mpsc::Receiver<P::Item>,
    drain: Drain,
) {
    // Every choice of the link is biased: the same events make the same course.
    tokio::select! {
        biased;
        () = drain.stopped() => {}
        () = keep_connected(&shared, &peer, &mut items) => {}
    }
    shared.down("the gateway stops");
}

async fn keep_connected<P: Peer>(shared: &Shared<P>, peer: &P, items: &mut mpsc::Receiver<P::Item>) {
    let mut backoff = BACKOFF_FIRST;
    loop {
        let connected = tokio::select! {
            biased;
            connected = peer.connect() => connected,
            () = discard(items) => return,
        };
        let mut last = BACKOFF_LAST;
        let why = match connected {
            Ok(connection) => {
                backoff = BACKOFF_FIRST;
                serve(shared, peer, items, connection).await
            }
            Err(status) => {
                if reason_of(&status).as_deref() == Some(Reason::StaleEpoch.as_str()) {
                    last = BACKOFF_APART;
                }
                status.message().to_owned()
            }
        };
        shared.down(&why);
        tokio::select! {
            biased;
            () = tokio::time::sleep(backoff) => {}
            () = discard(items) => return,
        }
        backoff = (backoff * 2).min(last);
    }
}

/// Pumps until the stream has to be made again; says why.
async fn serve<P: Peer>(
    shared: &Shared<P>,
    peer: &P,
    items: &mut mpsc::Receiver<P::Item>,
    connection: Connection<P>,
) -> String {
    let Connection { frames, replies, ready } = connection;
    shared.up(ready.clone());
    tokio::select! {
        biased;
        why = read(shared, replies) => why,
        why = write(shared, items, &frames) => why,
        why = peer.obsolete(&ready) => why,
        why = silent(shared, &frames) => why,
    }
}

async fn read<P: Peer>(shared: &Shared<P>, mut replies: Streaming<P::Reply>) -> String {
    loop {
        match replies.message().await {
            Ok(Some(reply)) => shared.deliver(reply),
            Ok(None) => return format!("the {} closed the stream", P::NAME),
            Err(status) => return format!("the stream to the {} broke: {}", P::NAME, status.message()),
        }
    }
}

async fn write<P: Peer>(
    shared: &Shared<P>,
    items: &mut mpsc::Receiver<P::Item>,
    frames: &mpsc::Sender<P::Frame>,
) -> String {
    loop {
        let first = tokio::select! {
            biased;
            item = items.recv() => match item {
                Some(item) => Some(item),
                None => return "the gateway stops".to_owned(),
            },
            () = shared.closes.notified() => None,
        };
        let Some(frame) = shared.gather(first, items) else {
            return format!("more than {CLOSES} closes wait for the {}", P::NAME);
        };
        if !frame.is_empty() && frames.send(P::frame(frame)).await.is_err() {
            return format!("the {} stopped reading", P::NAME);
        }
    }
}

/// Asks a suspect peer something of its own: what missed its deadline may have been left out of every frame
/// because its session ended first, and then no answer would ever clear the suspicion. Once is enough: the stream
/// loses nothing, and a peer that was stopped answers as soon as it goes on.
async fn silent<P: Peer>(shared: &Shared<P>, frames: &mpsc::Sender<P::Frame>) -> String {
    let is_suspect = |state: &State<P::Ready>| matches!(state, State::Suspect(..));
    loop {
        shared.state.wait_for(|state| is_suspect(state).then_some(())).await;
        let answer = async {
            if let Some(probe) = P::probe() {
                // A stream that takes no more is about to be told broken.
                let _ = frames.send(P::frame(vec![probe])).await;
            }
            shared.state.wait_for(|state| (!is_suspect(state)).then_some(())).await;
        };
        if tokio::time::timeout(SUSPECT_LIMIT, answer).await.is_err() {
            return format!("the {} was silent for {} s", P::NAME, SUSPECT_LIMIT.as_secs());
        }
    }
}

/// While there is no stream, whoever queues must not wait for one: its route is gone anyway.
async fn discard<T>(items: &mut mpsc::Receiver<T>) {
    while items.recv().await.is_some() {}
}

impl<P: Peer> Shared<P> {
    fn up(&self, ready: P::Ready) {
        let mut table = self.table.lock();
        table.up = true;
        let again: Vec<u64> = table.closed.drain(..).collect();
        table.closing.extend(again);
        drop(table);
        self.closes.notify_one();
        tracing::info!(peer = self.name, "connected");
        self.state.replace(State::Up(ready));
    }

    /// Every session hears of the break: its route's channel ends.
    fn down(&self, why: &str) {
        let mut table = self.table.lock();
        table.up = false;
        table.routes.clear();
        // The peer ends sequences of a broken stream by itself; a full list is not worth keeping.
        if table.closing.len() > CLOSES {
            table.closing.clear();
        }
        drop(table);
        self.state.modify(|state| {
            if matches!(state, State::Down(known) if &**known == why) {
                return false;
            }
            tracing::warn!(peer = self.name, "not connected: {why}");
            *state = State::Down(why.into());
            true
        });
    }

    fn deliver(&self, reply: P::Reply) {
        self.state.modify(|state| match state {
            State::Suspect(ready, _) => {
                tracing::info!(peer = self.name, "answers again");
                *state = State::Up(ready.clone());
                true
            }
            State::Up(_) | State::Draining(_) | State::Down(_) => false,
        });
        let mut table = self.table.lock();
        for out in P::outs(reply) {
            let seq = P::out_seq(&out);
            let sent = table.routes.get(&seq).map(|route| route.try_send(out));
            if let Some(Err(TrySendError::Full(_))) = sent {
                tracing::warn!(peer = self.name, seq, "sent more than a session may leave unread: cut off");
                table.routes.remove(&seq);
            }
        }
    }

    /// One frame's items, closes first; what is over its limits goes into the next. `None` when so many closes wait that a new stream is cheaper.
    fn gather(&self, first: Option<P::Item>, items: &mut mpsc::Receiver<P::Item>) -> Option<Vec<P::Item>> {
        let mut table = self.table.lock();
        if table.closing.len() > CLOSES {
            return None;
        }
        // Half of a frame is left to the sessions.
        let now = table.closing.len().min(FRAME_ITEMS / 2);
        let rest = table.closing.split_off(now);
        let closing = std::mem::replace(&mut table.closing, rest);
        if !table.closing.is_empty() {
            self.closes.notify_one();
        }
        let excess = (table.closed.len() + closing.len()).saturating_sub(RECENT_CLOSES);
        table.closed.extend(&closing);
        table.closed.drain(..excess);
        let mut frame: Vec<P::Item> = closing.into_iter().map(|seq| P::item(seq, P::close())).collect();
        let mut bytes = 0;
        let mut next = first.or_else(|| items.try_recv().ok());
        while let Some(item) = next {
            if table.routes.contains_key(&P::item_seq(&item)) {
                bytes += P::item_bytes(&item);
                frame.push(item);
            }
            let has_room = bytes < FRAME_BYTES && frame.len() < FRAME_ITEMS;
            next = if has_room { items.try_recv().ok() } else { None };
        }
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use eyrie_wire::v1::target_item::Op;
    use eyrie_wire::v1::{Revoke, TargetOut, TargetReply};

    use super::super::{Link, QUEUE, TargetPeer, TargetReady, UNREAD};
    use super::*;
    use crate::catalog::Served;

    fn ready() -> TargetReady {
        TargetReady { epoch: 1, served: Arc::new(Served::without_text(Default::default())) }
    }

    fn link() -> (Link<TargetPeer>, mpsc::Receiver<eyrie_wire::v1::TargetItem>) {
        let (queue, items) = mpsc::channel(QUEUE);
        let link = Link::over(queue, "target".to_owned());
        link.shared.up(ready());
        (link, items)
    }

    fn closes(link: &Link<TargetPeer>, items: &mut mpsc::Receiver<eyrie_wire::v1::TargetItem>) -> Vec<u64> {
        let frame = link.shared.gather(None, items).unwrap();
        frame.into_iter().filter(|item| matches!(item.op, Some(Op::Close(_)))).map(|item| item.seq).collect()
    }

    #[test]
    fn a_close_overtakes_what_its_sequence_still_has_queued() {
        let (link, mut items) = link();
        let (stays, leaves) = (link.register().unwrap(), link.register().unwrap());
        let (stays_seq, leaves_seq) = (stays.seq, leaves.seq);
        leaves.try_send(Op::Revoke(Revoke {})).unwrap();
        stays.try_send(Op::Revoke(Revoke {})).unwrap();
        drop(leaves);
        let frame = link.shared.gather(None, &mut items).unwrap();
        let sent: Vec<_> = frame.iter().map(|i| (i.seq, matches!(i.op, Some(Op::Close(_))))).collect();
        assert_eq!(sent, [(leaves_seq, true), (stays_seq, false)]);
    }

    #[test]
    fn a_break_is_heard_by_every_route_and_closes_are_told_again() {
        let (link, mut items) = link();
        let (stays, leaves) = (link.register().unwrap(), link.register().unwrap());
        let (stays_seq, leaves_seq) = (stays.seq, leaves.seq);
        drop(leaves);
        assert_eq!(closes(&link, &mut items), [leaves_seq]);
        link.shared.down("broken");
        assert!(stays.is_broken() && link.register().is_none() && !link.is_up());
        drop(stays);
        link.shared.up(ready());
        assert_eq!(closes(&link, &mut items), [stays_seq, leaves_seq]);
        assert!(closes(&link, &mut items).is_empty());
    }

    #[test]
    fn a_session_that_reads_nothing_is_cut_off_and_nobody_else() {
        let (link, _items) = link();
        let (mut reads, silent) = (link.register().unwrap(), link.register().unwrap());
        let out = |seq| TargetOut { seq, body: None };
        for _ in 0..=UNREAD {
            link.shared.deliver(TargetReply { hello: None, outs: vec![out(silent.seq), out(reads.seq)] });
            assert!(reads.try_recv().is_some());
        }
        assert!(!reads.is_broken());
        assert!(silent.replies.is_closed(), "no more is kept for it");
    }

    #[test]
    fn many_closes_are_told_in_several_frames() {
        let (link, mut items) = link();
        let stays = link.register().unwrap();
        stays.try_send(Op::Revoke(Revoke {})).unwrap();
        let all: Vec<u64> = (10..10 + FRAME_ITEMS as u64).collect();
        link.shared.table.lock().closing = all.clone();
        let frame = link.shared.gather(None, &mut items).unwrap();
        assert_eq!((frame.len(), frame.last().unwrap().seq), (FRAME_ITEMS / 2 + 1, stays.seq));
        assert_eq!(closes(&link, &mut items), all[FRAME_ITEMS / 2..]);
        assert!(closes(&link, &mut items).is_empty());
    }

    #[test]
    fn a_full_queue_beside_closes_fills_more_than_one_frame() {
        let (link, mut items) = link();
        let stays = link.register().unwrap();
        for _ in 0..QUEUE {
            stays.try_send(Op::Revoke(Revoke {})).unwrap();
        }
        link.shared.table.lock().closing = (10..110).collect();
        let mut frame = || link.shared.gather(None, &mut items).unwrap().len();
        assert_eq!((frame(), frame()), (FRAME_ITEMS, QUEUE + 100 - FRAME_ITEMS));
    }

    #[test]
    fn too_many_closes_are_worth_a_new_stream() {
        let (link, mut items) = link();
        link.shared.table.lock().closing = (0..=CLOSES as u64).collect();
        assert!(link.shared.gather(None, &mut items).is_none());
        link.shared.down("overflow");
        assert_eq!(closes(&link, &mut items).len(), 0);
    }
}
