"""What a loader's processes did when: recorders read (tape), made sense of (timeline), written (chrome), drawn (plot)."""
