"""Image files: decode JPEG, PNG and the other formats that Pillow supports into rows of a batch.

The head of a file is checked in Python before any library allocates memory for pixels. JPEG is decoded by the libjpeg-turbo that
Pillow is linked with, bound at run time (src/jpeg.h), at 1/2, 1/4 or 1/8 of the size if the crop stays twice as large as the
result, and only as far as the crop needs. Other formats are decoded by Pillow. A crop is a window (box, clip, size) in pixels of
the stored image, even where torchvision takes two steps, and src/resample.h shrinks it in one pass.

Rejected: float arithmetic (fused operations differ between machines); Pillow's order of passes (its scalar pass covers more rows);
patching the height of a JPEG to skip rows (hides damage); keeping a decompressor between images (a file without tables would be
decoded with those of the last one).
"""
