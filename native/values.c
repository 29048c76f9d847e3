/* Values as bytes; the plain twin, and the layout, are in serialize/values.py.
 *
 * Exact types are told by pointer comparison. An encoder that meets any other type gives up: the
 * value then goes by the plain twin, or by pickle. A decoder knows every tag. Values that need
 * Python code are made by `rebuild`.
 */
#include "native.h"

#include <stdbool.h>

enum {
    NONE, TRUE_, FALSE_, INTEGER, FLOAT, COMPLEX, TEXT, BYTES, TUPLE, LIST, SET, FROZENSET,
    DICTIONARY, ORDERED, AGAIN, TENSOR, REFERENCE, ATTRIBUTED,
    TORCH, SIZE, NAME, MADE, BIG_INTEGER, HOME,
};
/* The same limits as in values.py. */
enum { DEPTH_LIMIT = 150, REPEATED_BYTES = 32, HOME_BYTES = 24 };
enum { FEW = 16 };

static PyObject *unfold;  /* Returns the parts of a value of a kind that needs code in Python, */
static PyObject *rebuild; /* and this makes the value of its parts. */
static PyObject *name_dict, *ordered_dict;

int values_init(void)
{
    name_dict = PyUnicode_InternFromString("__dict__");
    PyObject *collections = PyImport_ImportModule("collections");
    if (name_dict == NULL || collections == NULL)
        return -1;
    ordered_dict = PyObject_GetAttrString(collections, "OrderedDict");
    Py_DECREF(collections);
    return ordered_dict == NULL ? -1 : 0;
}

/* set_value_parts(unfold, rebuild); called once. */
PyObject *values_set_parts(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    if (!PyArg_ParseTuple(arguments, "OO", &unfold, &rebuild))
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
    numbered *slots, own[FEW];
    size_t count, capacity; /* The capacity is a power of two. */
} numbering;

static void numbering_init(numbering *all)
{
    memset(all->own, 0, sizeof all->own);
    all->slots = all->own;
    all->count = 0;
    all->capacity = FEW;
}

static void numbering_free(numbering *all)
{
    for (size_t index = 0; all->count && index < all->capacity; index++)
        Py_XDECREF(all->slots[index].object);
    if (all->slots != all->own)
        PyMem_Free(all->slots);
}

/* Returns the slot of an object, or the free one where it belongs. */
static numbered *numbering_slot(numbered *slots, size_t capacity, PyObject *object)
{
    size_t mask = capacity - 1, at = (((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20) & mask;
    while (slots[at].object != NULL && slots[at].object != object)
        at = (at + 1) & mask;
    return &slots[at];
}

static int numbering_grow(numbering *all)
{
    size_t capacity = 4 * all->capacity;
    numbered *grown = PyMem_Calloc(capacity, sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t index = 0; index < all->capacity; index++)
        if (all->slots[index].object != NULL)
            *numbering_slot(grown, capacity, all->slots[index].object) = all->slots[index];
    if (all->slots != all->own)
        PyMem_Free(all->slots);
    all->slots = grown;
    all->capacity = capacity;
    return 0;
}

/* Finds an object, or gives it the next number of its kind; returns -1 on failure. */
static int numbering_find(numbering *all, PyObject *object, uint32_t *next, uint32_t *number,
                          bool *is_new)
{
    numbered *slot = numbering_slot(all->slots, all->capacity, object);
    *is_new = slot->object == NULL;
    if (!*is_new) {
        *number = slot->number;
        return 0;
    }
    if (2 * ++all->count >= all->capacity) {
        if (numbering_grow(all))
            return -1;
        slot = numbering_slot(all->slots, all->capacity, object);
    }
    *number = (*next)++;
    *slot = (numbered){Py_NewRef(object), *number};
    return 0;
}

/* Encoding */

typedef struct {
    buffer out;
    PyObject *tensors;                /* A list, which gets each tensor once. */
    PyObject *main_by_name, *home_of; /* For `unfold`. */
    numbering seen;
    uint32_t tensor_count, container_count, other_count;
    int depth;
} encoder;

static outcome add(encoder *into, PyObject *value);

static int add_tag(encoder *into, unsigned char tag)
{
    return buffer_add(&into->out, &tag, 1);
}

static outcome add_number(encoder *into, unsigned char tag, size_t number)
{
    uint32_t small = (uint32_t)number;
    if (number > UINT32_MAX)
        return BEYOND;
    unsigned char *at = buffer_extend(&into->out, 5);
    if (at == NULL)
        return FAILED;
    at[0] = tag;
    memcpy(at + 1, &small, 4);
    return DONE;
}

static outcome add_eight(encoder *into, unsigned char tag, const void *eight)
{
    unsigned char *at = buffer_extend(&into->out, 9);
    if (at == NULL)
        return FAILED;
    at[0] = tag;
    memcpy(at + 1, eight, 8);
    return DONE;
}

static outcome add_string(encoder *into, unsigned char tag, const char *bytes, Py_ssize_t size)
{
    outcome done = add_number(into, tag, (size_t)size);
    if (done == DONE && buffer_add(&into->out, bytes, (size_t)size))
        return FAILED;
    return done;
}

/* Gives up at an object that came before and cannot be referred to: written twice, a few nested
 * tuples would fill the memory. */
static outcome check_first(encoder *into, PyObject *object)
{
    uint32_t number;
    bool is_new;
    if (numbering_find(&into->seen, object, &into->other_count, &number, &is_new))
        return FAILED;
    return is_new ? DONE : BEYOND;
}

/* Adds a text or bytes; a longer one that comes twice is left to pickle, which writes it once. */
static outcome add_repeatable(encoder *into, unsigned char tag, PyObject *object, const char *bytes,
                              Py_ssize_t size)
{
    outcome done = size > REPEATED_BYTES ? check_first(into, object) : DONE;
    return done == DONE ? add_string(into, tag, bytes, size) : done;
}

static outcome add_text(encoder *into, PyObject *text)
{
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes != NULL)
        return add_repeatable(into, TEXT, text, bytes, size);
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return FAILED;
    PyErr_Clear();
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (encoded == NULL)
        return FAILED;
    outcome done = add_repeatable(into, TEXT, text, PyBytes_AS_STRING(encoded),
                                  PyBytes_GET_SIZE(encoded));
    Py_DECREF(encoded);
    return done;
}

/* Adds the parts of a value, whatever its type: the first one as it is, the others as values. */
static outcome add_unfolded(encoder *into, PyObject *value)
{
    if (into->depth >= DEPTH_LIMIT)
        return BEYOND;
    PyObject *parts = PyObject_CallFunctionObjArgs(unfold, value, into->main_by_name, into->home_of,
                                                   NULL);
    if (parts == NULL)
        return FAILED;
    if (parts == Py_None) {
        Py_DECREF(parts);
        return BEYOND;
    }
    PyObject *first = PyTuple_GET_ITEM(parts, 0);
    outcome done = buffer_add(&into->out, PyBytes_AS_STRING(first), (size_t)PyBytes_GET_SIZE(first))
                       ? FAILED
                       : DONE;
    into->depth++;
    for (Py_ssize_t index = 1; done == DONE && index < PyTuple_GET_SIZE(parts); index++)
        done = add(into, PyTuple_GET_ITEM(parts, index));
    into->depth--;
    Py_DECREF(parts);
    return done;
}

static outcome add_integer(encoder *into, PyObject *value)
{
    int is_beyond;
    long long number = PyLong_AsLongLongAndOverflow(value, &is_beyond);
    if (number == -1 && PyErr_Occurred())
        return FAILED;
    if (is_beyond || number == LLONG_MIN)
        return add_unfolded(into, value);
    return add_eight(into, INTEGER, &number);
}

static outcome add_tensor(encoder *into, PyObject *tensor)
{
    uint32_t number;
    bool is_new;
    PyObject *attributes = PyObject_GetAttr(tensor, name_dict);
    if (attributes == NULL)
        return FAILED;
    bool has_some = !PyDict_CheckExact(attributes) || PyDict_GET_SIZE(attributes);
    Py_DECREF(attributes);
    if (has_some)
        return BEYOND;
    if (numbering_find(&into->seen, tensor, &into->tensor_count, &number, &is_new))
        return FAILED;
    if (is_new && PyList_Append(into->tensors, tensor))
        return FAILED;
    return add_number(into, TENSOR, number);
}

/* Writes AGAIN for a list, set or dict that came before; otherwise numbers it and writes nothing. */
static outcome add_if_again(encoder *into, PyObject *container, bool *is_again)
{
    uint32_t number;
    bool is_new;
    if (numbering_find(&into->seen, container, &into->container_count, &number, &is_new))
        return FAILED;
    *is_again = !is_new;
    return is_new ? DONE : add_number(into, AGAIN, number);
}

/* Adds the items of a tuple, or of a list, which code of the program may change meanwhile. */
static outcome add_items(encoder *into, unsigned char tag, PyObject *sequence)
{
    bool is_list = tag == LIST;
    Py_ssize_t count = is_list ? PyList_GET_SIZE(sequence) : PyTuple_GET_SIZE(sequence);
    outcome done = add_number(into, tag, (size_t)count);
    for (Py_ssize_t index = 0; done == DONE && index < count; index++) {
        if (is_list && PyList_GET_SIZE(sequence) != count)
            return BEYOND;
        PyObject *item = is_list ? PyList_GET_ITEM(sequence, index) : PyTuple_GET_ITEM(sequence, index);
        Py_INCREF(item);
        done = add(into, item);
        Py_DECREF(item);
    }
    return done;
}

static outcome add_dictionary(encoder *into, PyObject *dictionary)
{
    PyObject *key, *value;
    Py_ssize_t place = 0, left = PyDict_GET_SIZE(dictionary);
    outcome done = add_number(into, DICTIONARY, (size_t)left);
    while (done == DONE && PyDict_Next(dictionary, &place, &key, &value)) {
        if (left-- == 0)
            return BEYOND; /* Code of the program has changed it. */
        Py_INCREF(key);
        Py_INCREF(value);
        done = add(into, key);
        if (done == DONE)
            done = add(into, value);
        Py_DECREF(key);
        Py_DECREF(value);
    }
    return done == DONE && left ? BEYOND : done;
}

/* An empty tuple or frozenset is one object for all. */
static outcome add_container(encoder *into, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    bool is_again = false, is_constant = type == &PyTuple_Type || type == &PyFrozenSet_Type;
    outcome done = DONE;
    if (!is_constant)
        done = add_if_again(into, value, &is_again);
    else if (PyObject_Size(value))
        done = check_first(into, value);
    if (done != DONE || is_again)
        return done;
    if (type != &PyTuple_Type && type != &PyList_Type && type != &PyDict_Type)
        return add_unfolded(into, value);
    if (into->depth >= DEPTH_LIMIT)
        return BEYOND;
    into->depth++;
    done = type == &PyDict_Type ? add_dictionary(into, value)
                                : add_items(into, type == &PyList_Type ? LIST : TUPLE, value);
    into->depth--;
    return done;
}

static outcome add(encoder *into, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if ((PyObject *)type == library.tensor_type || (PyObject *)type == library.parameter_type)
        return add_tensor(into, value);
    if (value == Py_None)
        return add_tag(into, NONE) ? FAILED : DONE;
    if (type == &PyBool_Type)
        return add_tag(into, value == Py_True ? TRUE_ : FALSE_) ? FAILED : DONE;
    if (type == &PyLong_Type)
        return add_integer(into, value);
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        return add_eight(into, FLOAT, &number);
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

/* encode_values(value, tensors, main_by_name, home_of) -> bytes, or None where it has to give up. */
PyObject *values_encode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4 || !PyList_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "encode_values takes a value, a list and two more");
        return NULL;
    }
    encoder into = {.tensors = arguments[1], .main_by_name = arguments[2], .home_of = arguments[3]};
    buffer_init(&into.out);
    numbering_init(&into.seen);
    outcome done = add(&into, arguments[0]);
    PyObject *made = done == DONE ? PyBytes_FromStringAndSize((char *)into.out.data,
                                                              (Py_ssize_t)into.out.size)
                     : done == BEYOND ? Py_NewRef(Py_None)
                                      : NULL;
    buffer_free(&into.out);
    numbering_free(&into.seen);
    return made;
}

/* Decoding */

typedef struct {
    reader in;
    PyObject *tensors, *externals, *resolve, *come_home;
    PyObject *containers; /* A list of the lists, sets and dicts so far; made when needed. */
    int depth;
} decoder;

static PyObject *read_value(decoder *from);

static PyObject *cut_short(void)
{
    PyErr_SetString(library.protocol_error, "a message is cut short");
    return NULL;
}

static PyObject *malformed(const char *text)
{
    PyErr_SetString(library.protocol_error, text);
    return NULL;
}

static int read_number(decoder *from, uint32_t *number)
{
    if (reader_take(&from->in, number, 4)) {
        cut_short();
        return -1;
    }
    return 0;
}

/* Reads a size and as many bytes; they stay in the message. */
static const char *read_string(decoder *from, Py_ssize_t *size)
{
    uint32_t number;
    if (read_number(from, &number))
        return NULL;
    if (number > reader_left(&from->in)) {
        cut_short();
        return NULL;
    }
    const char *begin = (const char *)from->in.at;
    from->in.at += number;
    *size = (Py_ssize_t)number;
    return begin;
}

static PyObject *read_text(decoder *from)
{
    Py_ssize_t size;
    const char *bytes = read_string(from, &size);
    return bytes == NULL ? NULL : PyUnicode_DecodeUTF8(bytes, size, "surrogatepass");
}

static PyObject *read_bytes(decoder *from)
{
    Py_ssize_t size;
    const char *bytes = read_string(from, &size);
    return bytes == NULL ? NULL : PyBytes_FromStringAndSize(bytes, size);
}

/* Reads a count of values that take at least `least` bytes each. */
static int read_count(decoder *from, size_t least, Py_ssize_t *count)
{
    uint32_t number;
    if (read_number(from, &number))
        return -1;
    if (number > reader_left(&from->in) / least) {
        cut_short();
        return -1;
    }
    *count = (Py_ssize_t)number;
    return 0;
}

/* Keeps a container for values that refer back to it, before its content is read. */
static int keep(decoder *from, PyObject *container)
{
    if (from->containers == NULL && (from->containers = PyList_New(0)) == NULL)
        return -1;
    return PyList_Append(from->containers, container);
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

/* Fills a new list, set, frozenset or dict, which may be NULL. A frozenset cannot be referred to. */
static PyObject *read_into(decoder *from, PyObject *made)
{
    Py_ssize_t count = 0;
    bool is_list = made && PyList_Check(made), is_dictionary = made && PyDict_Check(made);
    bool is_failed = made == NULL || read_count(from, is_dictionary ? 2 : 1, &count) ||
                     (!PyFrozenSet_CheckExact(made) && keep(from, made));
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

/* Returns the object with the next number in a sequence. */
static PyObject *read_place(decoder *from, PyObject *sequence)
{
    uint32_t number;
    if (read_number(from, &number))
        return NULL;
    Py_ssize_t size = sequence == NULL ? 0 : PySequence_Size(sequence);
    if (size < 0)
        return NULL;
    if (number >= (size_t)size)
        return malformed("a message names an object that it does not have");
    return PySequence_GetItem(sequence, (Py_ssize_t)number);
}

static PyObject *read_integer(decoder *from)
{
    long long number;
    return reader_take(&from->in, &number, 8) ? cut_short() : PyLong_FromLongLong(number);
}

/* Has Python make a value of one or two others; takes the references, which may be NULL. */
static PyObject *rebuilt(int tag, PyObject *first, PyObject *second)
{
    PyObject *made = NULL;
    if (first != NULL && second != NULL)
        made = PyObject_CallFunction(rebuild, "iOO", tag, first, second);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return made;
}

static PyObject *read_tagged(decoder *from, unsigned char tag)
{
    double parts[2];
    PyObject *first;
    switch (tag) {
    case NONE:
        return Py_NewRef(Py_None);
    case TRUE_:
        return Py_NewRef(Py_True);
    case FALSE_:
        return Py_NewRef(Py_False);
    case INTEGER:
        return read_integer(from);
    case BIG_INTEGER:
        return rebuilt(tag, read_bytes(from), Py_NewRef(Py_None));
    case FLOAT:
        return reader_take(&from->in, parts, 8) ? cut_short() : PyFloat_FromDouble(parts[0]);
    case COMPLEX:
        return reader_take(&from->in, parts, 16) ? cut_short()
                                                 : PyComplex_FromDoubles(parts[0], parts[1]);
    case TEXT:
        return read_text(from);
    case BYTES:
        return read_bytes(from);
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
    case ORDERED:
        first = read_into(from, PyObject_CallNoArgs(ordered_dict));
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    case AGAIN:
        return read_place(from, from->containers);
    case TENSOR:
        return read_place(from, from->tensors);
    case REFERENCE:
        return read_place(from, from->externals);
    case ATTRIBUTED:
        first = read_value(from);
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    case TORCH:
        return rebuilt(tag, read_text(from), Py_NewRef(Py_None));
    case SIZE:
        return rebuilt(tag, read_value(from), Py_NewRef(Py_None));
    case NAME:
        return rebuilt(tag, read_bytes(from), Py_NewRef(from->resolve));
    case MADE:
        first = read_text(from);
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    case HOME:
        first = PyBytes_FromStringAndSize(NULL, HOME_BYTES);
        if (first != NULL && reader_take(&from->in, PyBytes_AS_STRING(first), HOME_BYTES)) {
            Py_DECREF(first);
            return cut_short();
        }
        return rebuilt(tag, first, Py_NewRef(from->come_home));
    default:
        return malformed("a message has a value of an unknown kind");
    }
}

static PyObject *read_value(decoder *from)
{
    unsigned char tag;
    if (reader_take(&from->in, &tag, 1))
        return cut_short();
    if (from->depth > DEPTH_LIMIT)
        return malformed("a message is nested too deeply");
    from->depth++;
    PyObject *value = read_tagged(from, tag);
    from->depth--;
    return value;
}

/* decode_values(data, tensors, externals, resolve, come_home) -> the value; see values.decode. */
PyObject *values_decode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer data;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "decode_values takes five arguments");
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE))
        return NULL;
    const unsigned char *begin = data.buf;
    decoder from = {.in = {begin, begin + data.len},
                    .tensors = arguments[1],
                    .externals = arguments[2],
                    .resolve = arguments[3],
                    .come_home = arguments[4]};
    PyObject *value = read_value(&from);
    if (value != NULL && from.in.at != from.in.end) {
        PyErr_Format(library.protocol_error, "a message has %zu bytes too many",
                     reader_left(&from.in));
        Py_CLEAR(value);
    }
    Py_XDECREF(from.containers);
    PyBuffer_Release(&data);
    return value;
}
