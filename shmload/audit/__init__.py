"""The audit: a record of what each rank was delivered, and the proof that every sample came exactly once."""
