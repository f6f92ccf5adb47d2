# The trainer's leases of delivered slots, and the list of all leases of this process; included by trainer.pyx.

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.string cimport memcpy
from cpython.object cimport PyObject

cdef extern from *:
    """
    static int shml_num_forks; /* forks between the process that imported the module and this one; getpid would be a system call */
    #if PY_VERSION_HEX < 0x030D0000
    #define Py_IsFinalizing _Py_IsFinalizing
    #endif
    /* Return whether this is a thread of Python's, with or without the GIL: torch releases the GIL while it frees a tensor. */
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
    """An entry in the list of all local rings of this process, through which a fork finds every lease."""

    cdef shml_local_ring *_local_ring
    cdef object _ended  # called when a lease ends, if slots wait for device copies; must live as long as any lease
    cdef int _num_forks

    def __dealloc__(self):
        if self._local_ring != NULL:
            shml_local_ring_drop(self._local_ring)


cdef void _report_ended(void *context, uint32_t slot) noexcept nogil:
    """Call `_ended` if this thread belongs to Python. This takes the GIL, if there is one, as torch does to free numpy's memory."""
    if not shml_has_python():
        return
    with gil:
        _call_ended(<_LocalRing>context, slot)


cdef _call_ended(_LocalRing entry, uint32_t slot):
    cdef PyObject *kind
    cdef PyObject *value
    cdef PyObject *traceback
    if entry._num_forks != shml_num_forks or entry._ended is None:  # the copy in a forked child does not hold the slot
        return
    PyErr_Fetch(&kind, &value, &traceback)  # memory may be freed while an exception is being raised
    try:
        entry._ended(slot)
    except KeyboardInterrupt:  # ^C arrived here, where it cannot be raised
        PyErr_SetInterrupt()
    except BaseException:  # the slot then has no event, so its next user waits for the whole device, which reports the error
        pass
    finally:
        PyErr_Restore(kind, value, traceback)


cdef list _local_rings = []
cdef object _local_rings_lock = object()  # its critical section is held while the list is changed


cdef _LocalRing _enter(shml_local_ring *local_ring):
    cdef _LocalRing entry = _LocalRing.__new__(_LocalRing)
    entry._num_forks = shml_num_forks
    shml_local_ring_keep(local_ring)
    entry._local_ring = local_ring
    with cython.critical_section(_local_rings_lock):
        _local_rings[:] = [e for e in _local_rings if (<_LocalRing>e)._local_ring.refs > 1] + [entry]
    return entry


def live_leases():
    """Return an additional Lease for every slot that this process has leased and that is in shared memory."""
    cdef Lease lease
    cdef shml_local_ring *local_ring
    found = []
    for entry in list(_local_rings):
        local_ring = (<_LocalRing>entry)._local_ring
        for slot in range(local_ring.num_slots):
            if shml_lease_try_keep(&local_ring.places[slot].lease):
                lease = Lease.__new__(Lease)
                lease._lease = &local_ring.places[slot].lease
                if not lease._lease.is_private:
                    found.append(lease)
    return found


def stop_poisoning():
    """Stop overwriting released slots, in a forked child, because tensors freed there must not write into the parent's slots."""
    for entry in _local_rings:
        (<_LocalRing>entry)._local_ring.poison = 0


def harm_at_release(int number):
    """For tests: send this process the signal `number` when its next lease ends, before the slot is returned."""
    for entry in _local_rings:
        (<_LocalRing>entry)._local_ring.poison = -number


cdef void _drop_capsule(object capsule) noexcept:
    """Release the lease of a capsule that was never consumed."""
    cdef dl_managed *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef class Lease:
    """A lease of one slot. It ends, and the slot may be reused, when this object and every tensor made from it are dead.

    Attributes:
        used_nbytes: size of the packed batch in bytes; 0 if the slot contains rows as in the layout.
        has_note: whether the worker sent a note with the batch.
    """

    cdef shml_lease *_lease
    cdef readonly uint64_t used_nbytes
    cdef readonly bint has_note

    def __dealloc__(self):
        if self._lease != NULL:
            shml_lease_drop(self._lease)

    @property
    def slot(self):
        """Return the number of the slot."""
        return self._lease.slot

    @property
    def address(self):
        """Return the address of the slot's first byte."""
        return <uintptr_t>self._lease.base

    @property
    def nbytes(self):
        """Return the size of the slot in bytes."""
        return self._lease.nbytes

    def make_private(self):
        """Replace the slot by a private copy at the same address, in a forked child. Return False if memory is short."""
        return shml_lease_make_private(self._lease) == 0

    def bytes_at(self, uint64_t offset, uint64_t nbytes):
        """Return a private copy of `nbytes` of the slot's bytes from `offset` on."""
        if offset + nbytes > self._lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} end beyond the slot of {self._lease.nbytes}")
        return (<const char *>self._lease.base)[offset:offset + nbytes]

    def meta(self):
        """Return the last part of a packed batch (batch/packed_batch.py), which describes the other parts."""
        cdef uint64_t[2] place
        if self._lease.nbytes < sizeof(place):
            raise ValueError(f"the slot of {self._lease.nbytes} bytes does not contain a packed batch")
        memcpy(place, self._lease.base, sizeof(place))
        if place[0] > self._lease.nbytes or place[1] > self._lease.nbytes - place[0]:
            raise ValueError(f"{place[1]} bytes of metadata at {place[0]} end beyond the slot of {self._lease.nbytes}")
        return (<const char *>self._lease.base)[place[0]:place[0] + place[1]]

    cpdef capsule(self, uint64_t offset, int code, int bits, tuple shape):
        """Return a DLPack capsule of a C-order array that aliases the slot. The capsule, and then its consumer, keep the lease.

        Args:
            offset: offset of the array in the slot, in bytes.
            code, bits: DLPack's dtype.
            shape: shape of the array.
        Raises:
            ValueError: the array ends beyond the slot.
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
        """Return one tensor for each entry of `plan`, as a list, or a dict if `names` is given. They alias the leased slot.

        Args:
            plan: for each field (offset, code, bits, shape); or (-1, make, shape, dtype) for a field without bytes, whose tensor is
                `make(shape, dtype=dtype)`.
            from_dlpack: capsule -> tensor.
            names: the keys of the dict, in the order of `plan`.
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
