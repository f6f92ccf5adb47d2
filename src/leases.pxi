# The trainer's hold on delivered slots, and the list of all holds of this process; included by trainer.pyx.

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.string cimport memcpy
from cpython.object cimport PyObject

cdef extern from *:
    """
    static int shml_num_forks; /* between this process and the one that imported the module; getpid would be a system call */
    #if PY_VERSION_HEX < 0x030D0000
    #define Py_IsFinalizing _Py_IsFinalizing
    #endif
    /* whether this is a thread of Python's, with the GIL or without: torch gives it up while it frees a tensor */
    static inline int shml_has_python(void) {
        return Py_IsInitialized() && !Py_IsFinalizing() && PyGILState_GetThisThreadState() != NULL;
    }
    """
    int shml_num_forks
    int shml_has_python() nogil
    void PyErr_Fetch(PyObject **kind, PyObject **value, PyObject **traceback)
    void PyErr_Restore(PyObject *kind, PyObject *value, PyObject *traceback)
    void PyErr_SetInterrupt()


cdef class _LocalRing:
    """An entry in the list of all local rings of this process, by which a fork finds every lease."""

    cdef shml_local_ring *_local_ring
    cdef object _ended  # called at the ends of leases, if slots cool; it must live as long as a lease
    cdef int _num_forks

    def __dealloc__(self):
        if self._local_ring != NULL:
            shml_local_ring_drop(self._local_ring)


cdef void _report_ended(void *context, uint32_t slot) noexcept nogil:
    """Tells Python of a lease's end, in a thread that Python knows. It takes the GIL there, as torch does to free what is numpy's."""
    if not shml_has_python():
        return
    with gil:
        _call_ended(<_LocalRing>context, slot)


cdef _call_ended(_LocalRing entry, uint32_t slot):
    cdef PyObject *kind
    cdef PyObject *value
    cdef PyObject *traceback
    if entry._num_forks != shml_num_forks or entry._ended is None:  # a forked child's copy says nothing about the slot
        return
    PyErr_Fetch(&kind, &value, &traceback)  # memory is freed with exceptions under way, too
    try:
        entry._ended(slot)
    except KeyboardInterrupt:  # ^C came in here, where nobody can raise it
        PyErr_SetInterrupt()
    except BaseException:  # the slot has no event then, and whoever wants it waits for the whole device, which says what is wrong
        pass
    finally:
        PyErr_Restore(kind, value, traceback)


cdef list _local_rings = []


cdef _LocalRing _enter(shml_local_ring *local_ring):
    cdef _LocalRing entry = _LocalRing.__new__(_LocalRing)
    entry._num_forks = shml_num_forks
    _local_rings[:] = [e for e in _local_rings if (<_LocalRing>e)._local_ring.refs > 1]
    shml_local_ring_keep(local_ring)
    entry._local_ring = local_ring
    _local_rings.append(entry)
    return entry


def live_leases():
    """A Lease more for every slot of this process that has one and lies in shared memory."""
    cdef Lease lease
    cdef shml_local_ring *local_ring
    found = []
    for entry in _local_rings:
        local_ring = (<_LocalRing>entry)._local_ring
        for slot in range(local_ring.num_slots):
            if shml_lease_try_keep(&local_ring.places[slot].lease):
                lease = Lease.__new__(Lease)
                lease._lease = &local_ring.places[slot].lease
                if not lease._lease.is_private:
                    found.append(lease)
    return found


def stop_poisoning():
    """In a forked child: what dies here must not write into the parent's slots."""
    for entry in _local_rings:
        (<_LocalRing>entry)._local_ring.poison = 0


def harm_at_release(int number):
    """For tests of faults: the next lease of this process that ends sends it a signal, before its slot is back."""
    for entry in _local_rings:
        (<_LocalRing>entry)._local_ring.poison = -number


cdef void _drop_capsule(object capsule) noexcept:
    """A capsule nobody consumed still holds its reference."""
    cdef dl_managed *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef class Lease:
    """The trainer's hold on one delivered slot. It ends when this object and every tensor made from it are gone."""

    cdef shml_lease *_lease
    cdef readonly uint64_t used_nbytes  # bytes of a packed batch; 0: rows lie as the layout says
    cdef readonly bint has_note  # its worker sent one along

    def __dealloc__(self):
        if self._lease != NULL:
            shml_lease_drop(self._lease)

    @property
    def slot(self):
        """Which slot."""
        return self._lease.slot

    @property
    def address(self):
        """Where the slot's bytes begin."""
        return <uintptr_t>self._lease.base

    @property
    def nbytes(self):
        """Size of the slot."""
        return self._lease.nbytes

    def make_private(self):
        """In a forked child: gives it its own copy of the slot, in place. False if there is no memory for it."""
        return shml_lease_make_private(self._lease) == 0

    def bytes_at(self, uint64_t offset, uint64_t nbytes):
        """A private copy of some of the slot's bytes."""
        if offset + nbytes > self._lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} end beyond the slot of {self._lease.nbytes}")
        return (<const char *>self._lease.base)[offset:offset + nbytes]

    def meta(self):
        """The last part of a packed batch (batch/packed_batch.py), which says what the others are."""
        cdef uint64_t[2] place
        if self._lease.nbytes < sizeof(place):
            raise ValueError(f"a slot of {self._lease.nbytes} bytes holds no packed batch")
        memcpy(place, self._lease.base, sizeof(place))
        if place[0] > self._lease.nbytes or place[1] > self._lease.nbytes - place[0]:
            raise ValueError(f"{place[1]} bytes of meta at {place[0]} end beyond the slot of {self._lease.nbytes}")
        return (<const char *>self._lease.base)[place[0]:place[0] + place[1]]

    cpdef capsule(self, uint64_t offset, int code, int bits, tuple shape):
        """A DLPack capsule of a C-order array in the slot; whoever consumes it holds the lease.

        Args:
            code, bits: DLPack's dtype.
        """
        cdef int ndim = len(shape)
        cdef uint64_t nbytes = bits // 8
        cdef dl_managed *managed
        cdef int64_t extent
        for i in range(ndim):
            nbytes *= <uint64_t>shape[i]
        if offset + nbytes > self._lease.nbytes:
            raise ValueError(f"an array of {nbytes} bytes at {offset} ends beyond the slot of {self._lease.nbytes}")
        managed = shml_dl_new(self._lease, offset, code, bits, ndim)
        if managed == NULL:
            raise MemoryError
        for i in range(ndim):
            extent = shape[i]
            managed.shape[i] = extent
        return PyCapsule_New(managed, "dltensor", <void (*)(object) noexcept>_drop_capsule)

    def tensors(self, tuple plan, from_dlpack, tuple names=None):
        """One tensor per entry of `plan`, each holding the lease: a list, or with `names` a dict.

        Args:
            plan: per field (offset, code, bits, shape), or (-1, make, shape, dtype) for a field without bytes.
            from_dlpack: makes a tensor of a capsule.
        """
        cdef list found = []
        cdef dict named = {}
        cdef Py_ssize_t i
        for i, entry in enumerate(plan):
            if entry[0] >= 0:
                tensor = from_dlpack(self.capsule(entry[0], entry[1], entry[2], entry[3]))
            else:
                tensor = entry[1](entry[2], dtype=entry[3])
            if names is None:
                found.append(tensor)
            else:
                named[names[i]] = tensor
        return found if names is None else named
