# tf.train.Example and SequenceExample in protobuf's wire format, without copying; included by records.pyx.
#
# Every step uses `Cursor`; only its functions read bytes, and none reads past `end`. `varint`, `tag`, `submessage` and `skip` move
# the cursor past what they have read, and return False if it is malformed. A field is first surveyed (the effective map entry, its
# kind, the number of values) and written later from that entry, once its place is known.

cdef struct Cursor:
    const uint8_t *at
    const uint8_t *end

cdef struct FieldSpec:
    const uint8_t *name
    size_t name_nbytes
    int kind  # of an element: one of the codes below
    size_t itemsize
    int64_t numel  # values in a row; in one step along the ragged dimension if is_ragged
    bint is_ragged
    bint is_text  # one value of any length, as bytes
    const uint8_t *fill  # a row for records that lack the field, or NULL

cdef struct Found:
    const uint8_t *entry  # the effective map entry (the last one), or NULL
    size_t entry_nbytes
    const uint8_t *since  # first list of the final kind; the oneof's other member, before it, is discarded
    const uint8_t *at  # the last payload
    size_t nbytes
    int64_t count  # values
    int64_t num_pieces  # payloads that are not empty
    int64_t steps  # extent of the ragged dimension
    int64_t num_frames
    int kind  # NOTHING, BYTES, FLOATS, INTS
    bint is_list  # from feature_lists

cdef struct Room:  # for one row; a bound of its own, because the file may change between survey and writing
    uint8_t *at
    uint8_t *end

cdef enum:
    NOTHING, BYTES, FLOATS, INTS

cdef enum:
    RAW, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64, BOOL, FLOAT32, FLOAT64

cdef enum:
    FINE, BAD_WIRE, BAD_HEADER, BAD_LENGTH_SUM, TRUNCATED, BAD_SUM, MISSING, WRONG_KIND, WRONG_COUNT, WRONG_SIZE, OUT_OF_RANGE, TWICE, \
        NO_SUCH_INDEX, CHANGED, IS_SEQUENCE

cdef enum:
    MAX_DEPTH = 32  # nesting of groups, which no writer of Examples uses

SEQUENCE = 'the record is a tf.train.SequenceExample, whose feature lists TFRecordDataset(paths, schema, records="sequence") reads'


cdef inline bint varint(Cursor *c, uint64_t *value) noexcept nogil:
    cdef uint64_t total = 0
    cdef int shift = 0
    cdef uint8_t byte
    while c.at < c.end and shift < 70:
        byte = c.at[0]
        c.at += 1
        total |= <uint64_t>(byte & 0x7f) << shift if shift < 64 else 0
        if byte < 0x80:
            value[0] = total
            return True
        shift += 7
    return False


cdef inline bint tag_in_group(Cursor *c, uint64_t *number, int *wire) noexcept nogil:
    cdef uint64_t both
    if not varint(c, &both) or both >> 32:
        return False
    number[0] = both >> 3
    wire[0] = both & 7
    return True


cdef inline bint tag(Cursor *c, uint64_t *number, int *wire) noexcept nogil:
    return tag_in_group(c, number, wire) and number[0] != 0  # protobuf accepts field 0 in groups that it skips


cdef inline bint submessage(Cursor *c, Cursor *inner) noexcept nogil:
    cdef uint64_t nbytes
    if not varint(c, &nbytes) or nbytes > <uint64_t>(c.end - c.at):
        return False
    inner.at = c.at
    inner.end = c.at + nbytes
    c.at = inner.end
    return True


cdef bint skip(Cursor *c, uint64_t number, int wire) noexcept nogil:
    cdef uint64_t[MAX_DEPTH] open_groups
    cdef uint64_t ignored
    cdef Cursor inner
    cdef int depth = 0
    while True:
        if wire == 0:
            if not varint(c, &ignored):
                return False
        elif wire == 1 or wire == 5:
            if c.end - c.at < (8 if wire == 1 else 4):
                return False
            c.at += 8 if wire == 1 else 4
        elif wire == 2:
            if not submessage(c, &inner):
                return False
        elif wire == 3:
            if depth == MAX_DEPTH:
                return False
            open_groups[depth] = number
            depth += 1
        elif wire == 4:
            if depth == 0 or open_groups[depth - 1] != number:
                return False
            depth -= 1
        else:
            return False
        if depth == 0:
            return True
        if not tag_in_group(c, &number, &wire):
            return False


cdef int write_int(const FieldSpec *spec, uint8_t *to, uint64_t value) noexcept nogil:
    cdef int64_t number = <int64_t>value
    cdef int64_t low, high
    cdef int bits = 8 * <int>spec.itemsize
    if spec.kind == INT64:
        memcpy(to, &value, 8)
        return FINE
    if spec.kind == BOOL:
        low, high = 0, 1
    elif spec.kind >= UINT8:
        low, high = 0, (<int64_t>1 << bits) - 1 if bits < 64 else 0x7fffffffffffffff
    else:
        low, high = -(<int64_t>1 << (bits - 1)), (<int64_t>1 << (bits - 1)) - 1
    if number < low or number > high:
        return OUT_OF_RANGE
    memcpy(to, &value, spec.itemsize)  # little-endian, so the low bytes come first
    return FINE


cdef int write_floats(const FieldSpec *spec, uint8_t *to, const uint8_t *at, int64_t count) noexcept nogil:
    cdef float single
    cdef double wide
    cdef int64_t i
    if spec.kind == FLOAT32:
        memcpy(to, at, 4 * count)
        return FINE
    for i in range(count):
        memcpy(&single, at + 4 * i, 4)
        wide = single
        memcpy(to + 8 * i, &wide, 8)
    return FINE


cdef int walk_values(Cursor c, int kind, Found *found, const FieldSpec *spec, Room *to) noexcept nogil:
    """Count the values of one list message in `found`, or write them if `to` is given."""
    cdef uint64_t number, value
    cdef int wire, problem
    cdef Cursor inner
    cdef int64_t before, count
    while c.at < c.end:
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if number == 1 and wire == 2:
            if not submessage(&c, &inner):
                return BAD_WIRE
        elif number == 1 and wire == 5 and kind == FLOATS and c.end - c.at >= 4:
            inner.at = c.at
            c.at += 4
            inner.end = c.at
        elif number == 1 and wire == 0 and kind == INTS:
            inner.at = c.at
            if not varint(&c, &value):
                return BAD_WIRE
            inner.end = c.at
        else:
            if not skip(&c, number, wire):
                return BAD_WIRE
            continue
        if to == NULL:
            before = found.count
            if kind == BYTES:
                found.count += 1
            elif kind == FLOATS:
                if (inner.end - inner.at) & 3:
                    return BAD_WIRE
                found.count += (inner.end - inner.at) // 4
            else:
                found.at, found.nbytes = inner.at, inner.end - inner.at
                while inner.at < inner.end:
                    if inner.at[0] < 0x80:
                        found.count += 1
                        inner.at += 1
                    elif varint(&inner, &value):
                        found.count += 1
                    else:
                        return BAD_WIRE
                continue
            if found.count > before:
                found.num_pieces += 1
                found.at, found.nbytes = inner.at, inner.end - inner.at
        elif kind == FLOATS:
            count = (inner.end - inner.at) // 4
            if (count and spec.kind < FLOAT32) or count > (to.end - to.at) // <int64_t>spec.itemsize:
                return CHANGED
            write_floats(spec, to.at, inner.at, count)
            to.at += count * <int64_t>spec.itemsize
        elif kind == INTS:
            while inner.at < inner.end:
                if not varint(&inner, &value):
                    return BAD_WIRE
                if to.end - to.at < <int64_t>spec.itemsize:
                    return CHANGED
                problem = write_int(spec, to.at, value)
                if problem:
                    return problem
                to.at += spec.itemsize
        else:
            if inner.end - inner.at > to.end - to.at:
                return CHANGED
            memcpy(to.at, inner.at, inner.end - inner.at)
            to.at += inner.end - inner.at
    return FINE


cdef int walk_feature(Cursor c, Found *found, const FieldSpec *spec, Room *to) noexcept nogil:
    """Add a Feature message to what was found of the same feature before, or write it if `to` is given."""
    cdef uint64_t number
    cdef int wire, problem
    cdef Cursor inner
    cdef const uint8_t *start
    while c.at < c.end:
        start = c.at
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if wire != 2 or number > 3:
            if not skip(&c, number, wire):
                return BAD_WIRE
            continue
        if not submessage(&c, &inner):
            return BAD_WIRE
        if to == NULL:
            if found.kind != <int>number:  # a oneof: the other member is discarded
                found.kind = number
                found.since = start
                found.count = found.num_pieces = 0
            problem = walk_values(inner, number, found, spec, NULL)
        elif start >= found.since:
            problem = walk_values(inner, number, found, spec, to)
        else:
            problem = FINE
        if problem:
            return problem
    return FINE


cdef int fits(const Found *found, const FieldSpec *spec, int64_t *steps) noexcept nogil:
    """Check whether the values found form a row of the field, and set the number of its steps."""
    cdef int64_t step_nbytes = spec.numel * <int64_t>spec.itemsize
    cdef int64_t count = found.count
    steps[0] = 1
    if spec.is_text:
        return WRONG_KIND if found.kind != BYTES else WRONG_COUNT if count != 1 else FINE
    if found.kind == BYTES:
        if count == 0 and spec.is_ragged:
            steps[0] = 0
            return FINE
        if count != 1:
            return WRONG_COUNT
        if spec.is_ragged:
            if step_nbytes == 0 or <int64_t>found.nbytes % step_nbytes:
                return WRONG_SIZE
            steps[0] = <int64_t>found.nbytes // step_nbytes
            return FINE
        return FINE if <int64_t>found.nbytes == step_nbytes else WRONG_SIZE
    if count and ((found.kind == FLOATS) != (spec.kind >= FLOAT32) or spec.kind == RAW):
        return WRONG_KIND
    if spec.is_ragged:
        if spec.numel == 0 or count % spec.numel:
            return WRONG_COUNT
        steps[0] = count // spec.numel
        return FINE
    return FINE if count == spec.numel else WRONG_COUNT


cdef int walk_entry(Found *found, const FieldSpec *spec, Room *to) noexcept nogil:
    """Survey the value of the effective map entry, or write it if `to` is given."""
    cdef Cursor c, inner, frame
    cdef uint64_t number
    cdef int wire, problem = FINE
    cdef int64_t steps
    cdef Found one
    c.at, c.end = found.entry, found.entry + found.entry_nbytes
    while c.at < c.end:
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if number != 2 or wire != 2:
            if not skip(&c, number, wire):
                return BAD_WIRE
            continue
        if not submessage(&c, &inner):
            return BAD_WIRE
        if not found.is_list:
            problem = walk_feature(inner, found, spec, to)
            if problem:
                return problem
            continue
        while inner.at < inner.end:
            if not tag(&inner, &number, &wire):
                return BAD_WIRE
            if number != 1 or wire != 2:
                if not skip(&inner, number, wire):
                    return BAD_WIRE
                continue
            if not submessage(&inner, &frame):
                return BAD_WIRE
            memset(&one, 0, sizeof(Found))
            problem = walk_feature(frame, &one, spec, NULL)
            if not problem and to == NULL:
                found.num_frames += 1
                found.count, found.kind, found.nbytes = one.count, one.kind, one.nbytes
                problem = fits_frame(&one, spec)
            elif not problem:
                problem = walk_feature(frame, &one, spec, to)
            if problem:
                return problem
    return FINE


cdef int fits_frame(const Found *one, const FieldSpec *spec) noexcept nogil:
    """Check whether a Feature of a feature list is one step of the field."""
    if one.kind == BYTES:
        if one.count != 1:
            return WRONG_COUNT
        return FINE if <int64_t>one.nbytes == spec.numel * <int64_t>spec.itemsize else WRONG_SIZE
    if one.count and ((one.kind == FLOATS) != (spec.kind >= FLOAT32) or spec.kind == RAW):
        return WRONG_KIND
    return FINE if one.count == spec.numel else WRONG_COUNT


cdef int find_entries(Cursor c, const FieldSpec *specs, int num_fields, Found *found, bint is_list) noexcept nogil:
    """Find the map entries of the fields in a Features or FeatureLists message; a later entry replaces an earlier one."""
    cdef Cursor entry, inside, part, key
    cdef uint64_t number
    cdef int wire, i, which, guess = 0
    while c.at < c.end:
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if number != 1 or wire != 2:
            if not skip(&c, number, wire):
                return BAD_WIRE
            continue
        if not submessage(&c, &entry):
            return BAD_WIRE
        inside = entry
        key.at = key.end = entry.at
        while inside.at < inside.end:
            if not tag(&inside, &number, &wire):
                return BAD_WIRE
            if number == 1 and wire == 2:
                if not submessage(&inside, &key):
                    return BAD_WIRE
            elif not skip(&inside, number, wire):
                return BAD_WIRE
        for i in range(num_fields):
            which = (guess + i) % num_fields
            if specs[which].name_nbytes == <size_t>(key.end - key.at) and \
                    memcmp(specs[which].name, key.at, specs[which].name_nbytes) == 0:
                if found[which].entry != NULL and found[which].is_list != is_list:
                    return TWICE
                found[which].entry, found[which].entry_nbytes = entry.at, entry.end - entry.at
                found[which].is_list = is_list
                guess = which + 1
                break
    return FINE


cdef int survey_example(Cursor c, bint is_sequence, const FieldSpec *specs, int num_fields, Found *found, int *which) noexcept nogil:
    """Find every field of a record; `which` is the field that a problem is about, or -1."""
    cdef Cursor inner
    cdef uint64_t number
    cdef int wire, problem, i
    which[0] = -1
    while c.at < c.end:
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if wire == 2 and number == 2 and not is_sequence:
            return IS_SEQUENCE
        if wire == 2 and (number == 1 or number == 2):
            if not submessage(&c, &inner):
                return BAD_WIRE
            problem = find_entries(inner, specs, num_fields, found, number == 2)
            if problem:
                return problem
        elif not skip(&c, number, wire):
            return BAD_WIRE
    for i in range(num_fields):
        which[0] = i
        if found[i].entry != NULL:
            problem = walk_entry(&found[i], &specs[i], NULL)
            if problem:
                return problem
        if found[i].entry == NULL or (found[i].kind == NOTHING and not found[i].is_list):
            found[i].entry = NULL  # a feature without a kind counts as missing
            found[i].steps = 0
            if specs[i].fill == NULL and not (specs[i].is_ragged and not specs[i].is_text):
                return MISSING
        elif found[i].is_list:
            if specs[i].is_text or not specs[i].is_ragged:
                return WRONG_COUNT
            found[i].steps = found[i].num_frames
        else:
            problem = fits(&found[i], &specs[i], &found[i].steps)
            if problem == WRONG_COUNT and found[i].count == 0 and specs[i].fill != NULL:
                found[i].entry = NULL
            elif problem:
                return problem
    which[0] = -1
    return FINE


# ------------------------------------------------------------ all features, without a schema


cdef list bytes_of(const Found *found):
    """Return the values of a feature of bytes whose entry was surveyed."""
    cdef Cursor c, value, inner, piece
    cdef uint64_t number
    cdef int wire
    cdef const uint8_t *start
    cdef list values = []
    c.at, c.end = found.entry, found.entry + found.entry_nbytes
    while c.at < c.end and tag(&c, &number, &wire):
        if number != 2 or wire != 2:
            skip(&c, number, wire)
            continue
        if not submessage(&c, &value):
            break
        while value.at < value.end:
            start = value.at
            if not tag(&value, &number, &wire):
                break
            if number != BYTES or wire != 2 or start < found.since:
                skip(&value, number, wire)
                continue
            if not submessage(&value, &inner):
                break
            while inner.at < inner.end and tag(&inner, &number, &wire):
                if number != 1 or wire != 2:
                    skip(&inner, number, wire)
                elif submessage(&inner, &piece):
                    values.append(PyBytes_FromStringAndSize(<const char *>piece.at, piece.end - piece.at))
    return values


cdef object values_of(const Found *found):
    """Return the values of a feature whose entry was surveyed: an array, or a list of bytes."""
    cdef Found copied = found[0]
    cdef FieldSpec spec
    cdef Room room
    cdef uint8_t[::1] memory
    if found.kind == NOTHING:
        return []
    if found.kind == BYTES:
        return bytes_of(found)
    memset(&spec, 0, sizeof(FieldSpec))
    spec.kind, spec.itemsize = (FLOAT32, 4) if found.kind == FLOATS else (INT64, 8)
    values = np.empty(found.count, np.float32 if found.kind == FLOATS else np.int64)
    if found.count:
        memory = values.view(np.uint8)
        room.at, room.end = &memory[0], &memory[0] + memory.shape[0]
        walk_entry(&copied, &spec, &room)
    return values


cdef int read_features(Cursor c, dict features) except -1:
    """Add the features of a Features message; return BAD_WIRE if it is malformed."""
    cdef Cursor entry, inside, key
    cdef uint64_t number
    cdef int wire
    cdef Found found
    while c.at < c.end:
        if not tag(&c, &number, &wire):
            return BAD_WIRE
        if number != 1 or wire != 2:
            if not skip(&c, number, wire):
                return BAD_WIRE
            continue
        if not submessage(&c, &entry):
            return BAD_WIRE
        inside = entry
        key.at = key.end = entry.at
        while inside.at < inside.end:
            if not tag(&inside, &number, &wire):
                return BAD_WIRE
            if number == 1 and wire == 2:
                if not submessage(&inside, &key):
                    return BAD_WIRE
            elif not skip(&inside, number, wire):
                return BAD_WIRE
        memset(&found, 0, sizeof(Found))
        found.entry, found.entry_nbytes = entry.at, entry.end - entry.at
        if walk_entry(&found, NULL, NULL):
            return BAD_WIRE
        name = PyBytes_FromStringAndSize(<const char *>key.at, key.end - key.at).decode()
        features[name] = values_of(&found)
    return FINE


def example_features(bytes record not None):
    """Return the features of a tf.train.Example by name, as protobuf's parser merges and replaces them.

    Returns:
        For each feature, a float32 or int64 array of shape `(n,)`, or a list of bytes; an empty list if it has no values of any kind.
    Raises:
        ValueError: the bytes are malformed, a name is not UTF-8, or the record is a tf.train.SequenceExample, whose context has the
            number of an Example's features.
    """
    cdef Cursor c, inner
    cdef uint64_t number
    cdef int wire
    cdef bint is_sound = True
    cdef const uint8_t *begin = <const uint8_t *><char *>record
    cdef dict features = {}
    c.at, c.end = begin, begin + len(record)
    while is_sound and c.at < c.end:
        is_sound = tag(&c, &number, &wire)
        if not is_sound:
            break
        if number == 1 and wire == 2:
            is_sound = submessage(&c, &inner) and read_features(inner, features) == FINE
        elif number == 2 and wire == 2:
            raise ValueError(SEQUENCE)
        else:
            is_sound = skip(&c, number, wire)
    if not is_sound:
        raise ValueError(f"the bytes are not a valid protobuf message: the error is at or before byte {c.at - begin}")
    return features
