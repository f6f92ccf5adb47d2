"""TFRecord files in memory: find where records begin, and read a batch of them into rows, all without the GIL.

    record: u64 length | u32 masked sum of the length | data | u32 masked sum of the data

A record is surveyed first: its header is checked and its fields are found, but nothing is copied. Then each field is written to its
place: at once, or, if a row's size depends on the record, after the survey of the whole batch. The sum of a small record is
computed in the survey, which loads its bytes into the cache anyway; the sum of a large one while its bytes are copied.

Files may be truncated or overwritten at any time. Their state is compared before the survey and after the last byte was read; in
between, no value that is read twice bounds a write: rows end where the survey said.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

import numpy as np

cdef extern from "crc32c.h":
    void crc_start()
    uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc32c_streamed(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc_masked(uint32_t crc) noexcept nogil

cdef extern from "streamed.h":
    const size_t SHML_STREAMED_NBYTES
    void shml_copy_streamed(uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil

cdef extern from *:
    void __builtin_prefetch(const void *) noexcept nogil

include "file_state.pxi"
include "example.pxi"
include "record_frames.pxi"
include "record_rows.pxi"

crc_start()

KINDS = {
    "int8": INT8, "int16": INT16, "int32": INT32, "int64": INT64, "uint8": UINT8, "uint16": UINT16, "uint32": UINT32,
    "uint64": UINT64, "bool": BOOL, "float32": FLOAT32, "float64": FLOAT64,
}
cdef enum:
    FORM_RAW, FORM_EXAMPLE, FORM_SEQUENCE
cdef enum:
    LONG_RECORD = 16384  # records of at least this many bytes are summed while they are copied


cdef class RecordReader:
    """A reader of records of some files, according to a list of fields.

    Args:
        files: C-contiguous buffers; references are kept.
        states: (path, device, inode, nbytes, mtime_ns) of each file as returned by `MappedFile`; None for private memory.
        ends: int64; number of records up to and including each file.
        starts: int64; offset of each record in its file.
        fields: (name, kind, itemsize, numel, is_ragged, is_text, fill or None) each.
        form: 0 raw, 1 Example, 2 SequenceExample.
        verify: 0 only bounds, 1 sums of lengths, 2 all sums.
    """

    cdef Py_buffer *_views
    cdef int _num_views
    cdef FieldSpec *_specs
    cdef WatchedFile *_watched
    cdef readonly int num_fields
    cdef int _form, _verify
    cdef const int64_t[::1] _ends, _starts
    cdef list _kept, _states

    def __cinit__(
        self, list files, list states, const int64_t[::1] ends, const int64_t[::1] starts, list fields, int form, int verify
    ):
        cdef int i
        cdef WatchedFile *watched
        self._kept, self._states = [], states
        self._ends, self._starts, self._form, self._verify = ends, starts, form, verify
        self._views = <Py_buffer *>calloc(max(len(files), 1), sizeof(Py_buffer))
        self._watched = <WatchedFile *>calloc(max(len(files), 1), sizeof(WatchedFile))
        self._specs = <FieldSpec *>calloc(max(len(fields), 1), sizeof(FieldSpec))
        if self._views == NULL or self._watched == NULL or self._specs == NULL:
            raise MemoryError
        for file, state in zip(files, states, strict=True):
            if state is not None:
                watched = &self._watched[self._num_views]
                path, watched.was.device, watched.was.inode, watched.was.nbytes, watched.was.mtime_ns = state
                watched.path = path
            PyObject_GetBuffer(file, &self._views[self._num_views], PyBUF_C_CONTIGUOUS)
            self._num_views += 1
        for i, (name, kind, itemsize, numel, is_ragged, is_text, fill) in enumerate(fields):
            self._kept.append((name, fill))
            self._specs[i].name = <const uint8_t *><char *>name
            self._specs[i].name_nbytes = len(name)
            self._specs[i].kind, self._specs[i].itemsize, self._specs[i].numel = kind, itemsize, numel
            self._specs[i].is_ragged, self._specs[i].is_text = is_ragged, is_text
            if fill is not None:
                self._specs[i].fill = <const uint8_t *><char *>fill
        self.num_fields = len(fields)

    def __dealloc__(self):
        for i in range(self._num_views):
            PyBuffer_Release(&self._views[i])
        free(self._views)
        free(self._watched)
        free(self._specs)

    def survey(self, const int64_t[::1] indices not None, list targets=None):
        """Find the fields of some records.

        Args:
            targets: buffers for the rows of all fields, as in `Survey.write`. Each record is then written right after it was found,
                while it is in the nearest cache; only for fields that are neither ragged nor text.
        Returns:
            a `Survey`; its `problem` describes the first bad record.
        Raises:
            ValueError: a buffer is too small, or rows of a field have no fixed size.
        """
        cdef Survey survey = Survey.__new__(Survey, self, indices.shape[0])
        cdef _Targets rows = None
        cdef uint8_t **to = NULL
        cdef Py_ssize_t row
        cdef int i
        if targets is not None:
            rows = _Targets(targets, self.num_fields)
            for i in range(self.num_fields):
                if self._specs[i].is_ragged or self._specs[i].is_text or rows.to[i] == NULL:
                    raise ValueError(f"field {i} has no rows of a fixed size, which writing several at once requires")
                rows.check(i, indices.shape[0] * row_nbytes(&self._specs[i], NULL))
            to = rows.to
        with nogil:
            for row in range(indices.shape[0]):
                if row == 0:
                    self._locate(&survey.records[row], indices[row])
                if row + 1 < indices.shape[0]:
                    self._locate(&survey.records[row + 1], indices[row + 1])
                if not self._survey_row(survey, row):
                    break
                if to != NULL and not survey._write_row(row, to):
                    break
        return survey

    cdef bint has_changed(self, int64_t file) noexcept nogil:
        return self._watched[file].path != NULL and file_has_changed(self._watched[file].path, &self._watched[file].was)

    cdef void _locate(self, Record *record, int64_t index) noexcept nogil:
        """Find where a record begins (file -1 if it does not exist), and prefetch its first lines, because it is read next."""
        cdef int64_t low = 0, high = self._ends.shape[0], middle
        cdef const uint8_t *at
        cdef int line
        record.index, record.file = index, -1
        if high == 0 or index < 0 or index >= self._ends[high - 1]:
            return
        while low < high:
            middle = (low + high) >> 1
            if self._ends[middle] <= index:
                low = middle + 1
            else:
                high = middle
        record.file, record.start = low, self._starts[index]
        at = <const uint8_t *>(<uintptr_t>self._views[low].buf + <uintptr_t>record.start)
        for line in range(16):
            __builtin_prefetch(at + 64 * line)  # only a hint; the address may be past the end

    cdef bint _survey_row(self, Survey survey, Py_ssize_t row) noexcept nogil:
        cdef Record *record = &survey.records[row]
        cdef Py_buffer *view
        cdef Cursor c
        cdef Found *found = survey.found + row * self.num_fields
        cdef int problem, which = -1
        if record.file < 0:
            survey.fail(NO_SUCH_INDEX, row, -1)
            return False
        if not survey.is_used[record.file]:
            survey.is_used[record.file] = True
            if self.has_changed(record.file):
                survey.fail(CHANGED, row, -1)
                return False
        view = &self._views[record.file]
        problem = framed(<const uint8_t *>view.buf, view.len, record.start, self._verify, &record.nbytes)
        if problem:
            survey.fail(problem, row, -1)
            return False
        record.data = <const uint8_t *>view.buf + record.start + 12
        if self._verify == ALL_SUMS and record.nbytes < LONG_RECORD:
            if not is_intact(record):
                survey.fail(BAD_SUM, row, -1)
                return False
        if self._form == FORM_RAW:
            found.at, found.nbytes, found.count, found.kind = record.data, record.nbytes, 1, BYTES
            found.entry = record.data
            problem = fits(found, self._specs, &found.steps)
            which = 0
        else:
            c.at, c.end = record.data, record.data + record.nbytes
            problem = survey_example(c, self._form == FORM_SEQUENCE, self._specs, self.num_fields, found, &which)
        if problem:
            if self._verify == ALL_SUMS and record.nbytes >= LONG_RECORD and not is_intact(record):
                problem = BAD_SUM  # it caused the other problem
            survey.fail(problem, row, which)
            return False
        return True


cdef struct WatchedFile:
    const char *path  # NULL for private memory, which does not change
    FileState was


cdef class Survey:
    """Records that are found but not copied yet."""

    cdef RecordReader _reader  # keeps the files mapped
    cdef Record *records
    cdef Found *found
    cdef uint8_t *is_used  # [file]
    cdef readonly Py_ssize_t num_rows
    cdef int _problem, _field
    cdef Py_ssize_t _row

    def __cinit__(self, RecordReader reader, Py_ssize_t num_rows):
        self._reader, self.num_rows = reader, num_rows
        self.records = <Record *>calloc(max(num_rows, 1), sizeof(Record))
        self.found = <Found *>calloc(max(num_rows * reader.num_fields, 1), sizeof(Found))
        self.is_used = <uint8_t *>calloc(max(reader._num_views, 1), 1)
        if self.records == NULL or self.found == NULL or self.is_used == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.records)
        free(self.found)
        free(self.is_used)

    cdef void fail(self, int problem, Py_ssize_t row, int field) noexcept nogil:
        self._problem, self._row, self._field = problem, row, field

    @property
    def problem(self):
        """Return (name, row, index, file, start, nbytes, field or -1, kind found, count found, bytes found), or None."""
        if self._problem == FINE:
            return None
        cdef Record *record = &self.records[self._row]
        cdef Found *found = self.found + self._row * self._reader.num_fields + max(self._field, 0)
        return (PROBLEMS[self._problem], self._row, record.index, record.file, record.start, record.nbytes, self._field,
                found.kind, found.count, found.nbytes)

    def place(self, Py_ssize_t row):
        """Return (index, file, start) of a row's record."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is out of range: there are {self.num_rows}")
        return self.records[row].index, self.records[row].file, self.records[row].start

    def is_still_so(self):
        """Return whether no file has changed since its records were found; otherwise set `problem`. Call it after all reads."""
        cdef Py_ssize_t row
        cdef int64_t file
        with nogil:
            for row in range(self.num_rows):
                file = self.records[row].file
                if file >= 0 and self.is_used[file] == 1:
                    self.is_used[file] = 2
                    if self._reader.has_changed(file):
                        self.fail(CHANGED, row, -1)
                        break
        return self._problem == FINE

    def steps(self, int field):
        """Return the extent of a ragged field in each row."""
        return [self.found[row * self._reader.num_fields + field].steps for row in range(self.num_rows)]

    def texts(self, int field):
        """Return the values of a text field, as one bytes object each."""
        cdef Py_ssize_t row
        cdef Found *found
        cdef list values = []
        for row in range(self.num_rows):
            found = self.found + row * self._reader.num_fields + field
            if found.entry == NULL:
                values.append(self._reader._kept[field][1])
            else:
                values.append(PyBytes_FromStringAndSize(<const char *>found.at, found.nbytes))
        return values

    def write(self, list targets):
        """Write every field: the rows of a field end to end into its C-contiguous buffer, which is None for text.

        Returns:
            whether no problem was found; otherwise `problem` describes it.
        Raises:
            ValueError: a buffer is too small.
        """
        cdef int num_fields = self._reader.num_fields, i
        cdef Py_ssize_t row
        cdef uint64_t wanted
        cdef _Targets rows = _Targets(targets, num_fields)
        for i in range(num_fields):
            wanted = 0
            for row in range(self.num_rows):
                wanted += row_nbytes(&self._reader._specs[i], self.found + row * num_fields + i)
            rows.check(i, wanted)
        with nogil:
            for row in range(self.num_rows):
                if not self._write_row(row, rows.to):
                    break
        return self._problem == FINE

    cdef bint _write_row(self, Py_ssize_t row, uint8_t **to) noexcept nogil:
        cdef FieldSpec *specs = self._reader._specs
        cdef int num_fields = self._reader.num_fields, i, problem, fused = -1
        cdef Record *record = &self.records[row]
        cdef Found *found = self.found + row * num_fields
        cdef FieldSpec *spec
        cdef Room room
        cdef uint32_t stored, crc
        cdef size_t before
        if self._reader._verify == ALL_SUMS and record.nbytes >= LONG_RECORD:
            for i in range(num_fields):  # the largest payload that is copied unchanged is summed during the copy
                if to[i] != NULL and found[i].entry != NULL and is_plain(&found[i], &specs[i]):
                    if found[i].nbytes >= LONG_RECORD and (fused < 0 or found[i].nbytes > found[fused].nbytes):
                        fused = i
            crc = 0
            if fused < 0:
                crc = crc32c_copied(0, NULL, record.data, record.nbytes)
            else:
                before = found[fused].at - record.data
                crc = crc32c_copied(0, NULL, record.data, before)
                crc = crc_of_copy(crc, to[fused], found[fused].at, found[fused].nbytes)
                crc = crc32c_copied(
                    crc, NULL, found[fused].at + found[fused].nbytes, record.nbytes - before - found[fused].nbytes
                )
            memcpy(&stored, record.data + record.nbytes, 4)
            if stored != crc_masked(crc):
                self.fail(BAD_SUM, row, -1)
                return False
        for i in range(num_fields):
            spec = &specs[i]
            if to[i] == NULL:
                continue
            if found[i].entry == NULL:
                if spec.fill != NULL and not spec.is_ragged:
                    memcpy(to[i], spec.fill, row_nbytes(spec, &found[i]))
            elif i == fused:
                pass
            elif is_plain(&found[i], spec):
                copy(to[i], found[i].at, found[i].nbytes)
            else:
                room.at, room.end = to[i], to[i] + row_nbytes(spec, &found[i])
                problem = walk_entry(&found[i], spec, &room)
                if problem == FINE and room.at != room.end:
                    problem = CHANGED
                if problem:
                    self.fail(problem, row, i)
                    return False
            to[i] += row_nbytes(spec, &found[i])
        return True
