"""Image files: decode JPEG, PNG and the other formats that Pillow supports into rows of a batch."""
