/* Values as bytes; the plain twin, and the layout, are in engine/codec/values.py.
 *
 * Exact types are told by pointer comparison. Functions that encode return -1 where they give up:
 * with an exception if the program has failed, and without one if the value is to go by the plain twin,
 * or by pickle. A decoder knows every tag. Values that need Python code are made by `rebuild`. Where
 * bytes are malformed it fails without an exception, and the plain twin tells what is wrong.
 */
#include "native.h"

enum {
    NONE, TRUE_, FALSE_, INTEGER, FLOAT, COMPLEX, TEXT, BYTES, TUPLE, LIST, SET, FROZENSET,
    DICTIONARY, ORDERED, AGAIN, TENSOR, REFERENCE, ATTRIBUTED,
    TORCH, SIZE, NAME, MADE, BIG_INTEGER, HOME,
};
/* The same limits as in values.py. */
enum { DEPTH_LIMIT = 150, REPEATED_BYTES = 32, MOST_MADE = 8, COMPLEX_BYTES = 16, HOME_BYTES = 24 };
enum { FEW = 16 };

static PyObject *unfold;     /* Returns the parts of a value of a kind that needs code in Python, */
static PyObject *rebuilders; /* and these make the value of its parts: a list, by tag. */

/* set_value_parts(unfold, rebuilders); called once. */
PyObject *values_set_parts(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    if (!PyArg_ParseTuple(arguments, "OO!", &unfold, &PyList_Type, &rebuilders))
        return NULL;
    Py_INCREF(arguments); /* They stay for as long as the module. */
    Py_RETURN_NONE;
}

/* Objects by identity, each with a number: a hash table with open addressing. It owns its objects,
 * so that no other one gets the address of one of them. */
typedef struct {
    PyObject *object;
    uint32_t number;
} numbered;

typedef struct {
    buffer *out;
    PyObject *tensors;                /* A list, which gets each tensor once. */
    PyObject *receiver, *home_of;     /* For `unfold`. */
    numbered *slots;
    size_t count, capacity; /* Of slots; the capacity is a power of two, or 0. */
    uint32_t container_count;
    int depth, made_count;
} encoder;

/* Returns the slot of an object, or the free one where it belongs. */
static numbered *slot_of(const encoder *all, PyObject *object)
{
    size_t mask = all->capacity - 1;
    size_t at = (((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20) & mask;
    while (all->slots[at].object != NULL && all->slots[at].object != object)
        at = (at + 1) & mask;
    return &all->slots[at];
}

static int grow_slots(encoder *all)
{
    numbered *former = all->slots;
    size_t former_capacity = all->capacity, capacity = former_capacity ? 4 * former_capacity : FEW;
    numbered *slots = PyMem_Calloc(capacity, sizeof *slots);
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    all->slots = slots;
    all->capacity = capacity;
    for (size_t index = 0; index < former_capacity; index++)
        if (former[index].object != NULL)
            *slot_of(all, former[index].object) = former[index];
    PyMem_Free(former);
    return 0;
}

/* Finds the number of an object, or gives it `number`, which stays if it is new. */
static int find_number(encoder *all, PyObject *object, uint32_t *number, bool *is_new)
{
    if (2 * all->count >= all->capacity && grow_slots(all))
        return -1;
    numbered *slot = slot_of(all, object);
    *is_new = slot->object == NULL;
    if (*is_new) {
        *slot = (numbered){Py_NewRef(object), *number};
        all->count++;
    }
    *number = slot->number;
    return 0;
}

/* ---------------------------------------------------------------------------------- Encoding */

static int add(encoder *into, PyObject *value);

/* Adds a tag, and some bytes behind it. */
static inline int add_tagged(encoder *into, unsigned char tag, const void *bytes, size_t size)
{
    unsigned char *at = buffer_extend(into->out, 1 + size);
    if (at == NULL)
        return -1;
    at[0] = tag;
    memcpy(at + 1, bytes, size);
    return 0;
}

static int add_number(encoder *into, unsigned char tag, size_t number)
{
    uint32_t small = (uint32_t)number;
    return number > UINT32_MAX ? -1 : add_tagged(into, tag, &small, sizeof small);
}

/* Gives up at an object that came before and cannot be referred to: written twice, a few nested
 * tuples would fill the memory. */
static int check_first(encoder *into, PyObject *object)
{
    uint32_t number = 0;
    bool is_new;
    return find_number(into, object, &number, &is_new) || !is_new ? -1 : 0;
}

/* Adds a text or bytes; a longer one that comes twice is left to pickle, which writes it once. */
static int add_repeatable(encoder *into, unsigned char tag, PyObject *object, const char *bytes,
                          Py_ssize_t size)
{
    if (size > REPEATED_BYTES && check_first(into, object))
        return -1;
    return add_number(into, tag, (size_t)size) ? -1 : buffer_add(into->out, bytes, (size_t)size);
}

static int add_text(encoder *into, PyObject *text)
{
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes != NULL)
        return add_repeatable(into, TEXT, text, bytes, size);
    PyErr_Clear(); /* It has lone surrogates, and goes by pickle. */
    return -1;
}

/* Adds the parts of a value, whatever its type: the first one as it is, the others as values. */
static int add_unfolded(encoder *into, PyObject *value)
{
    if (into->depth >= DEPTH_LIMIT)
        return -1;
    PyObject *parts = PyObject_CallFunctionObjArgs(unfold, value, into->receiver, into->home_of,
                                                   NULL);
    int status = -1;
    if (parts != NULL && parts != Py_None) {
        PyObject *first = PyTuple_GET_ITEM(parts, 0);
        bool is_made = PyBytes_AS_STRING(first)[0] == MADE;
        if (!is_made || (++into->made_count <= MOST_MADE && !check_first(into, value)))
            status = buffer_add(into->out, PyBytes_AS_STRING(first), (size_t)PyBytes_GET_SIZE(first));
        int depth = into->depth;
        into->depth += is_made ? 2 : 1;
        for (Py_ssize_t index = 1; !status && index < PyTuple_GET_SIZE(parts); index++)
            status = add(into, PyTuple_GET_ITEM(parts, index));
        into->depth = depth;
    }
    Py_XDECREF(parts);
    return status;
}

static int add_integer(encoder *into, PyObject *value)
{
    int is_beyond;
    long long number = PyLong_AsLongLongAndOverflow(value, &is_beyond);
    if (is_beyond || number == LLONG_MIN)
        return add_unfolded(into, value);
    return add_tagged(into, INTEGER, &number, sizeof number);
}

static int add_tensor(encoder *into, PyObject *tensor)
{
    PyObject *attributes = PyObject_GetAttr(tensor, names[NAME_DICT]);
    bool is_plain = attributes != NULL && PyDict_CheckExact(attributes) &&
                    PyDict_GET_SIZE(attributes) == 0;
    Py_XDECREF(attributes);
    uint32_t number = (uint32_t)PyList_GET_SIZE(into->tensors);
    bool is_new;
    if (!is_plain || find_number(into, tensor, &number, &is_new))
        return -1;
    if (is_new && PyList_Append(into->tensors, tensor))
        return -1;
    return add_number(into, TENSOR, number);
}

/* Adds the items of a tuple, or of a list, which code of the program may change meanwhile. */
static int add_items(encoder *into, unsigned char tag, PyObject *sequence)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    int status = add_number(into, tag, (size_t)count);
    for (Py_ssize_t index = 0; !status && index < count; index++) {
        if (PySequence_Fast_GET_SIZE(sequence) != count)
            return -1;
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(sequence, index));
        status = add(into, item);
        Py_DECREF(item);
    }
    return status;
}

static int add_dictionary(encoder *into, PyObject *dictionary)
{
    PyObject *key, *value;
    Py_ssize_t place = 0, left = PyDict_GET_SIZE(dictionary);
    int status = add_number(into, DICTIONARY, (size_t)left);
    while (!status && PyDict_Next(dictionary, &place, &key, &value)) {
        if (left-- == 0)
            return -1; /* Code of the program has changed it. */
        Py_INCREF(key);
        Py_INCREF(value);
        status = add(into, key) || add(into, value) ? -1 : 0;
        Py_DECREF(key);
        Py_DECREF(value);
    }
    return left ? -1 : status;
}

static int add_container(encoder *into, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyTuple_Type || type == &PyFrozenSet_Type) {
        /* An empty one is one object for all. */
        if (PyObject_Size(value) && check_first(into, value))
            return -1;
    } else {
        uint32_t number = into->container_count;
        bool is_new;
        if (find_number(into, value, &number, &is_new))
            return -1;
        if (!is_new)
            return add_number(into, AGAIN, number);
        into->container_count++;
    }
    if (type != &PyTuple_Type && type != &PyList_Type && type != &PyDict_Type)
        return add_unfolded(into, value);
    if (into->depth >= DEPTH_LIMIT)
        return -1;
    into->depth++;
    int status = type == &PyDict_Type ? add_dictionary(into, value)
                                      : add_items(into, type == &PyList_Type ? LIST : TUPLE, value);
    into->depth--;
    return status;
}

static int add(encoder *into, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if ((PyObject *)type == library.tensor_type || (PyObject *)type == library.parameter_type)
        return add_tensor(into, value);
    if (value == Py_None)
        return add_tagged(into, NONE, "", 0);
    if (type == &PyBool_Type)
        return add_tagged(into, value == Py_True ? TRUE_ : FALSE_, "", 0);
    if (type == &PyLong_Type)
        return add_integer(into, value);
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        return add_tagged(into, FLOAT, &number, sizeof number);
    }
    if (type == &PyUnicode_Type)
        return add_text(into, value);
    if (type == &PyBytes_Type)
        return add_repeatable(into, BYTES, value, PyBytes_AS_STRING(value),
                              PyBytes_GET_SIZE(value));
    if (type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type ||
        type == &PySet_Type || type == &PyFrozenSet_Type || type == &PyODict_Type)
        return add_container(into, value);
    return add_unfolded(into, value);
}

int values_add(buffer *out, PyObject *const parts[4])
{
    encoder into = {.out = out, .tensors = parts[1], .receiver = parts[2], .home_of = parts[3]};
    int status = add(&into, parts[0]);
    for (size_t index = 0; index < into.capacity; index++)
        Py_XDECREF(into.slots[index].object);
    PyMem_Free(into.slots);
    return status;
}

/* encode_values(value, tensors, receiver, home_of) -> bytes, or False where it has to give up. */
PyObject *values_encode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4 || !PyList_CheckExact(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "encode_values takes a value, a list and two more");
    buffer out = {0};
    PyObject *made = NULL;
    if (!values_add(&out, arguments))
        made = PyBytes_FromStringAndSize((char *)out.data, (Py_ssize_t)out.size);
    else if (!PyErr_Occurred())
        made = Py_NewRef(Py_False);
    PyMem_Free(out.data);
    return made;
}

/* ---------------------------------------------------------------------------------- Decoding */

typedef struct {
    reader in;
    PyObject *tensors, *externals, *resolve, *come_home;
    PyObject *containers; /* A list of the lists, sets and dicts so far. */
    int depth;
} decoder;

static PyObject *read_value(decoder *from);

/* Reads a count of values that take at least `least` bytes each. */
static int read_count(decoder *from, size_t least, Py_ssize_t *count)
{
    uint32_t number;
    if (reader_take(&from->in, &number, sizeof number) || number > reader_left(&from->in) / least)
        return -1;
    *count = (Py_ssize_t)number;
    return 0;
}

static PyObject *read_bytes(decoder *from, size_t size)
{
    if (size > reader_left(&from->in))
        return NULL;
    from->in.at += size;
    return PyBytes_FromStringAndSize((const char *)from->in.at - size, (Py_ssize_t)size);
}

/* Reads a size, and as many bytes of a text or of bytes. */
static PyObject *read_string(decoder *from, bool is_text)
{
    Py_ssize_t size;
    if (read_count(from, 1, &size))
        return NULL;
    if (!is_text)
        return read_bytes(from, (size_t)size);
    from->in.at += size;
    return PyUnicode_DecodeUTF8((const char *)from->in.at - size, size, "surrogatepass");
}

static PyObject *read_tuple(decoder *from)
{
    Py_ssize_t count;
    if (read_count(from, 1, &count))
        return NULL;
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t index = 0; made != NULL && index < count; index++) {
        PyObject *value = read_value(from);
        if (value == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, index, value);
    }
    return made;
}

/* Fills a new list, set, frozenset or dict, which may be NULL. A value in it may refer back to it, but
 * not to a frozenset. */
static PyObject *read_into(decoder *from, PyObject *made)
{
    Py_ssize_t count = 0;
    bool is_list = made && PyList_Check(made), is_dictionary = made && PyDict_Check(made);
    if (from->containers == NULL)
        from->containers = PyList_New(0);
    bool is_failed = made == NULL || from->containers == NULL ||
                     read_count(from, is_dictionary ? 2 : 1, &count) ||
                     (!PyFrozenSet_CheckExact(made) && PyList_Append(from->containers, made));
    while (!is_failed && count-- > 0) {
        PyObject *first = read_value(from);
        PyObject *second = first && is_dictionary ? read_value(from) : NULL;
        is_failed = first == NULL || (is_dictionary && second == NULL) ||
                    (is_list         ? PyList_Append(made, first)
                     : is_dictionary ? PyObject_SetItem(made, first, second)
                                     : PySet_Add(made, first));
        Py_XDECREF(first);
        Py_XDECREF(second);
    }
    if (is_failed)
        Py_CLEAR(made);
    return made;
}

/* Returns the object with the next number in a sequence, which is NULL if it has none. */
static PyObject *read_place(decoder *from, PyObject *sequence)
{
    uint32_t number;
    Py_ssize_t size = sequence == NULL ? 0 : PySequence_Size(sequence);
    if (reader_take(&from->in, &number, sizeof number) || size <= 0 || number >= (size_t)size)
        return NULL;
    return PySequence_GetItem(sequence, (Py_ssize_t)number);
}

/* Has Python make a value of one or two others; takes the references, which may be NULL. */
static PyObject *rebuilt(int tag, PyObject *first, PyObject *second)
{
    PyObject *made = NULL;
    if (first != NULL && second != NULL)
        made = PyObject_CallFunctionObjArgs(PyList_GET_ITEM(rebuilders, tag), first, second, NULL);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return made;
}

static PyObject *read_tagged(decoder *from, unsigned char tag)
{
    long long integer;
    double real;
    PyObject *first;
    switch (tag) {
    case NONE:
        return Py_NewRef(Py_None);
    case TRUE_:
        return Py_NewRef(Py_True);
    case FALSE_:
        return Py_NewRef(Py_False);
    case INTEGER:
        return reader_take(&from->in, &integer, 8) ? NULL : PyLong_FromLongLong(integer);
    case FLOAT:
        return reader_take(&from->in, &real, 8) ? NULL : PyFloat_FromDouble(real);
    case TEXT:
    case BYTES:
        return read_string(from, tag == TEXT);
    case TUPLE:
        return read_tuple(from);
    case LIST:
        return read_into(from, PyList_New(0));
    case SET:
        return read_into(from, PySet_New(NULL));
    case FROZENSET:
        return read_into(from, PyFrozenSet_New(NULL));
    case DICTIONARY:
        return read_into(from, PyDict_New());
    case AGAIN:
        return read_place(from, from->containers);
    case TENSOR:
        return read_place(from, from->tensors);
    case REFERENCE:
        return read_place(from, from->externals);
    case COMPLEX:
        return rebuilt(tag, read_bytes(from, COMPLEX_BYTES), Py_NewRef(Py_None));
    case HOME:
        return rebuilt(tag, read_bytes(from, HOME_BYTES), Py_NewRef(from->come_home));
    case SIZE:
        return rebuilt(tag, read_value(from), Py_NewRef(Py_None));
    case BIG_INTEGER:
    case TORCH:
    case NAME:
        return rebuilt(tag, read_string(from, false), Py_NewRef(from->resolve));
    case ORDERED:
        first = read_into(from, PyODict_New());
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    case ATTRIBUTED:
    case MADE:
        first = tag == MADE ? read_string(from, false) : read_value(from);
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    default:
        return NULL;
    }
}

static PyObject *read_value(decoder *from)
{
    unsigned char tag;
    if (reader_take(&from->in, &tag, 1) || from->depth > DEPTH_LIMIT)
        return NULL;
    from->depth++;
    PyObject *value = read_tagged(from, tag);
    from->depth--;
    return value;
}

PyObject *values_read(reader in, PyObject *tensors, PyObject *externals, PyObject *resolve,
                      PyObject *come_home)
{
    decoder from = {in, tensors, externals, resolve, come_home, NULL, 0};
    PyObject *value = read_value(&from);
    if (value != NULL && from.in.at != from.in.end)
        Py_CLEAR(value);
    Py_XDECREF(from.containers);
    return value == NULL && !PyErr_Occurred() ? Py_NewRef(Py_NotImplemented) : value;
}

/* decode_values(data, tensors, externals, resolve, come_home): see `values_read`, and values.decode. */
PyObject *values_decode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer data;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "decode_values takes five arguments");
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE))
        return NULL;
    const unsigned char *begin = data.buf;
    PyObject *value = values_read((reader){begin, begin + data.len}, arguments[1], arguments[2],
                                  arguments[3], arguments[4]);
    PyBuffer_Release(&data);
    return value;
}
