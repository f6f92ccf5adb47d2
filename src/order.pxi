# What the loader asks of the engine; included by trainer.pyx, which reads it without Python's help.


cdef class Order:
    """One batch to be made: which, of which samples, and (in torch mode) by which worker. `slot` is -1 until published.

    An iterable dataset's order has as many indices as samples are wanted, each of them the pass's shared seed.

    Args:
        is_given: the indices are a batch sampler's own object, which `__getitems__` gets as it is.
    """

    cdef public int64_t epoch, step
    cdef public object indices  # an int64 array, or a sequence of a sampler's keys
    cdef public int worker, slot
    cdef public bint is_given
    cdef public object origins  # of rows after bad samples: (row they were ordered as, substitutes tried); None: there were none
    cdef public object ordered  # the indices before bad samples; None: there were none

    def __init__(self, int64_t epoch, int64_t step, indices, int worker=SHML_ANYONE, *, bint is_given=False):
        self.epoch = epoch
        self.step = step
        self.indices = indices
        self.worker = worker
        self.slot = -1
        self.is_given = is_given

    def __repr__(self):
        return f"Order(epoch={self.epoch}, step={self.step}, indices={self.indices!r}, worker={self.worker}, slot={self.slot})"

    @property
    def nrows(self):
        """Rows of the batch."""
        return len(self.indices)
