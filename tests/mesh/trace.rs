//! What happened in a seed, in order, with the virtual time.

use std::fmt::{Debug, Display};
use std::sync::{Arc, Mutex};

use eyrie_wire::Message;
use eyrie_wire::v1::{DraftFrame, DraftReply, TargetFrame, TargetReply};
use tokio::time::Instant;

/// Lines are only made when somebody will read them.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    began: Instant,
    lines: Option<Arc<Mutex<Vec<String>>>>,
}

impl Trace {
    pub(crate) fn new(is_kept: bool) -> Self {
        Self { began: Instant::now(), lines: is_kept.then(Arc::default) }
    }

    pub(crate) fn note<L: Display>(&self, line: impl FnOnce() -> L) {
        if let Some(lines) = &self.lines {
            let at = self.began.elapsed().as_millis();
            lines.lock().unwrap().push(format!("{at:>7} ms  {}", line()));
        }
    }

    pub(crate) fn text(&self) -> String {
        self.lines.as_ref().map(|lines| lines.lock().unwrap().join("\n")).unwrap_or_default()
    }
}

/// A message of a call in a few words.
pub(crate) fn summary(call: &str, way: char, message: &[u8]) -> String {
    let text = match (call.contains(" Rounds "), call.contains(">target"), way) {
        (true, true, '>') => TargetFrame::decode(message).map(|frame| words(&frame.items)),
        (true, true, _) => TargetReply::decode(message).map(|reply| words(&reply.outs)),
        (true, false, '>') => DraftFrame::decode(message).map(|frame| words(&frame.items)),
        (true, false, _) => DraftReply::decode(message).map(|reply| words(&reply.outs)),
        (false, ..) => Ok(format!("{} bytes", message.len())),
    };
    text.unwrap_or_else(|e| e.to_string())
}

fn words<T: Debug>(items: &[T]) -> String {
    let text = format!("{items:?}");
    text.chars().take(240).collect()
}
