"""What of this host would go wrong with a loader, in plain words: one small function a check."""
