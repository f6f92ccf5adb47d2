"""Photographs: from JPEG, PNG and what else Pillow reads to rows of a batch."""
