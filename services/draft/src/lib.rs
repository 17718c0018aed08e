//! The draft service: EAGLE-3 head over the target's mapped weights.
