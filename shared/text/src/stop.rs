//! Stop strings over a stream of text deltas, one per token.
//!
//! On a hit the text ends before the stop string, and the kept ids are those whose text begins before
//! it: a token's text begins where the text before its delta ended. A token that straddles the
//! beginning is kept; tokens without text right before the stop string are not.

use std::collections::VecDeque;

use crate::TextError;

/// Text and ids that are final: no later stop string can take them back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Emit {
    /// Text, following what was emitted before.
    pub text: String,
    /// How many further ids, in push order, belong to the reply.
    pub ids: usize,
}

/// What a delta led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Matched {
    /// No stop string is complete.
    Emit(Emit),
    /// A stop string is complete; ids that no emit has counted are not part of the reply.
    Hit {
        /// The last text and ids before the stop string.
        emit: Emit,
        /// Index of the stop string in the request's list.
        stop: usize,
    },
}

/// Finds the stop string that is complete first, however the text is cut into deltas; of several that
/// end at one place, the longest. Holds back no more than a proper prefix of a stop string.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    /// Length of the text emitted before `held`.
    emitted: usize,
    /// Where the texts of the ids not yet emitted begin, oldest first.
    starts: VecDeque<usize>,
    hit: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`; none at all lets everything through at once.
    ///
    /// # Errors
    /// An empty stop string.
    pub fn try_new(stops: Vec<String>) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        Ok(Self { stops, held: String::new(), emitted: 0, starts: VecDeque::new(), hit: None })
    }

    /// Takes the next token's text (empty if it has none, or none yet). After a hit, text and ids are
    /// dropped and the hit is reported again.
    pub fn push(&mut self, delta: &str) -> Matched {
        if self.hit.is_none() {
            self.starts.push_back(self.emitted + self.held.len());
        }
        self.scan(delta).unwrap_or_else(|| {
            let keep = self.held.len() - self.possible_stop();
            let ids = match self.stops.is_empty() {
                true => self.starts.len(),
                // A stop string can begin no earlier than the text that stays held.
                false => self.ids_before(self.emitted + keep),
            };
            Matched::Emit(self.emit(keep, ids))
        })
    }

    /// Ends the stream with what the detokenizer still held; without a hit, everything is released.
    pub fn finish(&mut self, tail: &str) -> Matched {
        self.scan(tail).unwrap_or_else(|| Matched::Emit(self.emit(self.held.len(), self.starts.len())))
    }

    /// Appends to the held text and looks for a stop string.
    fn scan(&mut self, delta: &str) -> Option<Matched> {
        if let Some(stop) = self.hit {
            return Some(Matched::Hit { emit: Emit::default(), stop });
        }
        self.held.push_str(delta);
        let (_, begin, stop) = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(i, stop)| self.held.find(stop).map(|at| (at + stop.len(), at, i)))
            .min()?;
        let emit = self.emit(begin, self.ids_before(self.emitted + begin));
        self.hit = Some(stop);
        self.held.clear();
        self.starts.clear();
        Some(Matched::Hit { emit, stop })
    }

    /// Length of the longest held suffix that is a proper prefix of a stop string.
    fn possible_stop(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = (self.held.len() + 1).saturating_sub(longest);
        let suffixes = (earliest..self.held.len()).filter(|&at| self.held.is_char_boundary(at));
        suffixes
            .map(|at| &self.held[at..])
            .find(|suffix| self.stops.iter().any(|stop| stop.starts_with(suffix)))
            .map_or(0, str::len)
    }

    fn ids_before(&self, place: usize) -> usize {
        self.starts.partition_point(|&start| start < place)
    }

    fn emit(&mut self, bytes: usize, ids: usize) -> Emit {
        self.starts.drain(..ids);
        self.emitted += bytes;
        Emit { text: self.held.drain(..bytes).collect(), ids }
    }
}
