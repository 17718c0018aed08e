use crate::{TextError, Tokenizer};

/// Decodes ids one at a time. The deltas and the flush, joined, are [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The beginning of one character: at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, pending: Vec::new() }
    }

    /// The text that `id` completes; a character whose last byte is still to come is held back.
    ///
    /// # Errors
    /// An id without a token; the stream is then unchanged.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if self.skip_special && self.tokenizer.is_special(id)? {
            return Ok(String::new());
        }
        self.pending.extend_from_slice(self.tokenizer.token_bytes(id)?);
        let mut text = String::with_capacity(self.pending.len());
        let mut read = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            read += chunk.valid().len();
            let end = read + chunk.invalid().len();
            // Only the end of the bytes can still be completed: a character cut short by another is broken.
            if chunk.invalid().is_empty() || (end == self.pending.len() && may_complete(chunk.invalid())) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            read = end;
        }
        self.pending.drain(..read);
        Ok(text)
    }

    /// What is held back, as the end of the text makes it: U+FFFD for an unfinished character.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether an invalid chunk is a character cut short by the end of the bytes.
fn may_complete(chunk: &[u8]) -> bool {
    std::str::from_utf8(chunk).is_err_and(|error| error.error_len().is_none())
}
