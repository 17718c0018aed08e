//! What an operator is told of targets and drafts.

use std::sync::Arc;

use eyrie_wire::v1::{Model, Peer, peer};

use super::{Member, Pool};
use crate::link::State;

impl Pool {
    /// Longest proposal of any draft that answers for a target that takes sequences.
    pub(crate) fn draft_limit(&self) -> Option<u32> {
        self.serving().into_iter().flat_map(Member::answering).map(|(_, limit)| limit).max()
    }

    /// Fills in what the draft that serves best means for clients, and how every peer stands.
    pub(crate) fn describe(&self, model: &mut Model) {
        let states =
            self.serving().into_iter().flat_map(|member| &member.drafts).map(|pair| pair.link.state());
        let best = states.min_by_key(|state| match state {
            State::Up(_) => 0,
            State::Suspect(..) | State::Draining(_) => 1,
            State::Down(_) => 2,
        });
        match best {
            None => model.not_speculating_because = "no draft is configured".to_owned(),
            Some(State::Down(why)) => model.not_speculating_because = why.to_string(),
            Some(State::Suspect(ready, _) | State::Draining(ready)) => {
                model.draft_name = ready.card.name.clone();
                model.not_speculating_because =
                    "the draft missed its deadline and is silent since".to_owned();
            }
            Some(State::Up(ready)) => {
                model.speculating = true;
                model.draft_name = ready.card.name.clone();
                model.shared_bytes = ready.lease.mapped_bytes;
                model.shared_kind = ready.lease.kind.clone();
            }
        }
        model.peers = self.members.iter().flat_map(|member| self.peers(member)).collect();
    }

    /// Sequences at targets, and at drafts.
    pub(crate) fn sequences(&self) -> [usize; 2] {
        let at_drafts =
            |member: &Arc<Member>| member.drafts.iter().map(|pair| pair.link.sequences()).sum::<usize>();
        let targets = self.members.iter().map(|member| member.link.sequences()).sum();
        [targets, self.members.iter().map(at_drafts).sum()]
    }

    /// The targets that take sequences; all of them while none does.
    fn serving(&self) -> Vec<&Member> {
        let view = self.view.borrow();
        let fingerprint = view.served.as_ref().map(|served| served.card.fingerprint.as_str());
        let serves = |member: &&Member| fingerprint.is_some_and(|f| member.serves(f).is_some());
        let all = || self.members.iter().map(Arc::as_ref);
        let serving: Vec<_> = all().filter(serves).collect();
        if serving.is_empty() { all().collect() } else { serving }
    }

    fn peers(&self, member: &Member) -> Vec<Peer> {
        let (mut state, mut because) = stand(&member.link.state());
        if let Some(fingerprint) = self.model_left_out(member) {
            (state, because) = (peer::State::OtherModel, format!("it serves another model, {fingerprint}"));
        }
        let target = Peer {
            role: peer::Role::Target as i32,
            address: member.address.to_string(),
            target: String::new(),
            state: state as i32,
            because,
            sequences: member.link.sequences() as u32,
        };
        let draft = |pair: &super::member::Pair| {
            let (state, because) = stand(&pair.link.state());
            Peer {
                role: peer::Role::Draft as i32,
                address: pair.address.to_string(),
                target: member.address.to_string(),
                state: state as i32,
                because,
                sequences: pair.link.sequences() as u32,
            }
        };
        std::iter::once(target).chain(member.drafts.iter().map(draft)).collect()
    }
}

fn stand<R>(state: &State<R>) -> (peer::State, String) {
    match state {
        State::Up(_) => (peer::State::Up, String::new()),
        State::Down(why) => (peer::State::Down, why.to_string()),
        State::Suspect(..) => (peer::State::Suspect, "silent since it missed a deadline".to_owned()),
        State::Draining(_) => (peer::State::Draining, "it lets its sequences end".to_owned()),
    }
}
