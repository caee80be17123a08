"""The collectives: one file per op, the same anatomy in each."""
