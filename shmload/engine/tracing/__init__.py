"""Record the events of a ring, and write them as a trace file.

`event_log.py` copies events out of the ring, `ring_timeline.py` derives the activities of trainer, workers and slots from them, and
`trace_file.py` writes these to a file. `trace.py` does all of it within the program, and `shmload trace`
(tools/trace_recording.py) does it outside.
"""
