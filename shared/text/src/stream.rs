use crate::{Detokenizer, Matched, StopMatcher, TextError, Tokenizer};

/// Ids in, final text and id counts out: a [`Detokenizer`] into a [`StopMatcher`]. Whole replies go
/// through it as well, so that they equal the stream.
#[derive(Debug, Clone)]
pub struct TextStream {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
}

impl TextStream {
    /// The stream of one completion.
    ///
    /// # Errors
    /// An empty stop string.
    pub fn try_new(tokenizer: &Tokenizer, skip_special: bool, stops: Vec<String>) -> Result<Self, TextError> {
        let matcher = StopMatcher::try_new(stops)?;
        Ok(Self { detokenizer: tokenizer.detokenizer(skip_special), matcher })
    }

    /// Takes the next id. After a hit ids are dropped and the hit is reported again.
    ///
    /// # Errors
    /// An id without a token.
    pub fn push(&mut self, id: u32) -> Result<Matched, TextError> {
        let delta = self.detokenizer.push(id)?;
        Ok(self.matcher.push(&delta))
    }

    /// Ends the stream: releases what was held back, unless that completes a stop string.
    pub fn finish(&mut self) -> Matched {
        let tail = self.detokenizer.flush();
        self.matcher.finish(&tail)
    }
}
