"""What shows, measures and checks loaders. Only the command line imports it."""
