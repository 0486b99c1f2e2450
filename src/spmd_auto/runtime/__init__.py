"""Running a planned step: arrays to where they belong, state born in pieces, further steps that follow the first."""
