"""What came of a run. In: a run folder, also a half-written one. Out: one HTML page, and lines in a terminal."""
