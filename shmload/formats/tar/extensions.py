"""The extensions whose members webdataset decodes as images, integers or text, and those of sounds and videos."""

from __future__ import annotations

_NAMES = """
blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx j2c
icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda
vst webp wmf emf xbm xpm
"""
_SOUNDS_AND_VIDEOS = """
aac avi flac h264 m4a mjpeg mkv mov mp3 mp4 ogg ogv opus wav webm wma wmv
"""
IMAGE_EXTENSIONS = frozenset(_NAMES.split())
INTEGERS = frozenset({"class", "cls", "cls2", "count", "id", "index", "inx"})
TEXTS = frozenset({"htm", "html", "text", "transcript", "txt"})
SOUNDS_AND_VIDEOS = frozenset(_SOUNDS_AND_VIDEOS.split())
