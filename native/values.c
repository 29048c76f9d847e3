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
enum { DEPTH_LIMIT = 150, REPEATED_BYTES = 32 };
enum { FEW = 16 };

static PyObject *rebuild;        /* Makes a value of a kind that needs code in Python. */
static PyObject *reference_type; /* The type of a reference's address. */
static PyObject *name_dict, *name_to_bytes, *name_from_bytes, *name_bit_length, *ordered_dict;

int values_init(void)
{
    name_dict = PyUnicode_InternFromString("__dict__");
    name_to_bytes = PyUnicode_InternFromString("to_bytes");
    name_from_bytes = PyUnicode_InternFromString("from_bytes");
    name_bit_length = PyUnicode_InternFromString("bit_length");
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == NULL)
        return -1;
    ordered_dict = PyObject_GetAttrString(collections, "OrderedDict");
    Py_DECREF(collections);
    bool is_made = name_dict && name_to_bytes && name_from_bytes && name_bit_length && ordered_dict;
    return is_made ? 0 : -1;
}

/* set_value_parts(rebuild, reference_type); called once. */
PyObject *values_set_parts(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *function, *type;
    if (!PyArg_ParseTuple(arguments, "OO", &function, &type))
        return NULL;
    Py_XSETREF(rebuild, Py_NewRef(function));
    Py_XSETREF(reference_type, Py_NewRef(type));
    Py_RETURN_NONE;
}

/* Objects by identity, each with a number in order of first appearance: a hash table with open
 * addressing. It owns its objects, so that no other one gets the address of one of them. */
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

/* Finds an object, or numbers it; returns -1 on failure. */
static int numbering_find(numbering *all, PyObject *object, size_t *number, bool *is_new)
{
    numbered *slot = numbering_slot(all->slots, all->capacity, object);
    *is_new = slot->object == NULL;
    if (!*is_new) {
        *number = slot->number;
        return 0;
    }
    if (2 * all->count >= all->capacity) {
        if (numbering_grow(all))
            return -1;
        slot = numbering_slot(all->slots, all->capacity, object);
    }
    *number = all->count++;
    *slot = (numbered){Py_NewRef(object), (uint32_t)*number};
    return 0;
}

/* Encoding */

typedef struct {
    buffer out;
    PyObject *tensors; /* A list, which gets each tensor once. */
    PyObject *name_of; /* Returns the name of a function or class as bytes, or None. */
    PyObject *home_of; /* Returns the three numbers of a reference that goes home, or None. */
    numbering tensor_numbers, containers, repeatable;
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

/* Adds a bytes object, and drops the reference to it; `bytes` may be NULL, with an exception. */
static outcome add_bytes_of(encoder *into, unsigned char tag, PyObject *bytes)
{
    char *data;
    Py_ssize_t size;
    if (bytes == NULL)
        return FAILED;
    outcome done = PyBytes_AsStringAndSize(bytes, &data, &size) ? FAILED
                                                                : add_string(into, tag, data, size);
    Py_DECREF(bytes);
    return done;
}

/* Gives up at an object that came before and cannot be referred to: written twice, a few nested
 * tuples would fill the memory. */
static outcome check_first(encoder *into, PyObject *object)
{
    size_t number;
    bool is_new;
    if (numbering_find(&into->repeatable, object, &number, &is_new))
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

static outcome add_integer(encoder *into, PyObject *value)
{
    int is_beyond;
    long long number = PyLong_AsLongLongAndOverflow(value, &is_beyond);
    if (number == -1 && PyErr_Occurred())
        return FAILED;
    if (!is_beyond && number != LLONG_MIN)
        return add_eight(into, INTEGER, &number);
    PyObject *bits = PyObject_CallMethodNoArgs(value, name_bit_length);
    if (bits == NULL)
        return FAILED;
    Py_ssize_t size = PyLong_AsSsize_t(bits) / 8 + 1;
    Py_DECREF(bits);
    PyObject *method = PyObject_GetAttr(value, name_to_bytes);
    if (method == NULL)
        return FAILED;
    PyObject *args = Py_BuildValue("(ns)", size, "little");
    PyObject *kwargs = Py_BuildValue("{sO}", "signed", Py_True);
    PyObject *bytes = args && kwargs ? PyObject_Call(method, args, kwargs) : NULL;
    Py_DECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return add_bytes_of(into, BIG_INTEGER, bytes);
}

static outcome add_tensor(encoder *into, PyObject *tensor)
{
    size_t number;
    bool is_new;
    PyObject *attributes = PyObject_GetAttr(tensor, name_dict);
    if (attributes == NULL)
        return FAILED;
    bool has_some = !PyDict_CheckExact(attributes) || PyDict_GET_SIZE(attributes);
    Py_DECREF(attributes);
    if (has_some)
        return BEYOND;
    if (numbering_find(&into->tensor_numbers, tensor, &number, &is_new))
        return FAILED;
    if (is_new && PyList_Append(into->tensors, tensor))
        return FAILED;
    return add_number(into, TENSOR, number);
}

/* Writes AGAIN for a list, set or dict that came before; otherwise numbers it and writes nothing. */
static outcome add_if_again(encoder *into, PyObject *container, bool *is_again)
{
    size_t number;
    bool is_new;
    if (numbering_find(&into->containers, container, &number, &is_new))
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

static outcome add_set(encoder *into, unsigned char tag, PyObject *set)
{
    PyObject *item, *iterator = PyObject_GetIter(set);
    if (iterator == NULL)
        return FAILED;
    outcome done = add_number(into, tag, (size_t)PySet_GET_SIZE(set));
    while (done == DONE && (item = PyIter_Next(iterator)) != NULL) {
        done = add(into, item);
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    return done == DONE && PyErr_Occurred() ? FAILED : done;
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

/* Returns whether attributes would hide members of the class, or have unusual names. */
static int are_unusual(PyObject *attributes)
{
    PyObject *name, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(attributes, &place, &name, &value)) {
        Py_ssize_t size;
        if (!PyUnicode_CheckExact(name))
            return 1;
        const char *text = PyUnicode_AsUTF8AndSize(name, &size);
        if (text == NULL)
            return -1;
        if (size >= 2 && text[0] == '_' && text[1] == '_')
            return 1;
        PyObject *member = PyObject_GetAttr((PyObject *)&PyODict_Type, name);
        if (member != NULL) {
            Py_DECREF(member);
            return 1;
        }
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Adds an OrderedDict in its own order, and its attributes. */
static outcome add_ordered(encoder *into, PyObject *dictionary)
{
    outcome done = FAILED;
    PyObject *key, *value, *keys = NULL, *attributes = PyObject_GetAttr(dictionary, name_dict);
    if (attributes == NULL)
        return FAILED;
    int unusual = are_unusual(attributes);
    if (unusual) {
        done = unusual < 0 ? FAILED : BEYOND;
        goto end;
    }
    keys = PySequence_List(dictionary);
    if (keys == NULL)
        goto end;
    done = add_number(into, ORDERED, (size_t)PyList_GET_SIZE(keys));
    for (Py_ssize_t index = 0; done == DONE && index < PyList_GET_SIZE(keys); index++) {
        key = PyList_GET_ITEM(keys, index);
        value = Py_XNewRef(PyDict_GetItemWithError(dictionary, key));
        if (value == NULL) {
            done = PyErr_Occurred() ? FAILED : BEYOND;
            break;
        }
        done = add(into, key);
        if (done == DONE)
            done = add(into, value);
        Py_DECREF(value);
    }
    if (done == DONE) {
        PyObject *copy = PyDict_Copy(attributes); /* Another object than any that came before. */
        done = copy == NULL ? FAILED : add(into, copy);
        Py_XDECREF(copy);
    }
end:
    Py_XDECREF(keys);
    Py_DECREF(attributes);
    return done;
}

static outcome add_size(encoder *into, PyObject *size)
{
    /* The tuple inside counts as a level of its own. */
    if (into->depth >= DEPTH_LIMIT)
        return BEYOND;
    return add_tag(into, SIZE) ? FAILED : add_items(into, TUPLE, size);
}

static outcome add_other(encoder *into, PyObject *value)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == library.dtype_type || type == library.device_type || type == library.layout_type ||
        type == library.memory_format_type) {
        PyObject *text = PyObject_Str(value);
        if (text == NULL)
            return FAILED;
        Py_ssize_t size;
        const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
        outcome done = bytes == NULL ? FAILED : add_string(into, TORCH, bytes, size);
        Py_DECREF(text);
        return done;
    }
    if (PyFunction_Check(value) || PyCFunction_Check(value) || PyType_Check(value)) {
        PyObject *name = PyObject_CallOneArg(into->name_of, value);
        if (name == Py_None) {
            Py_DECREF(name);
            return BEYOND;
        }
        return add_bytes_of(into, NAME, name);
    }
    PyObject *home = PyObject_CallOneArg(into->home_of, value);
    if (home == NULL)
        return FAILED;
    long long numbers[3];
    outcome done = BEYOND;
    if (home != Py_None) {
        done = FAILED;
        if (PyArg_ParseTuple(home, "LLL", &numbers[0], &numbers[1], &numbers[2])) {
            unsigned char *at = buffer_extend(&into->out, 25);
            if (at != NULL) {
                at[0] = HOME;
                memcpy(at + 1, numbers, 24);
                done = DONE;
            }
        }
    }
    Py_DECREF(home);
    return done;
}

static outcome add_container(encoder *into, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    bool is_again = false;
    if (into->depth >= DEPTH_LIMIT)
        return BEYOND;
    outcome done = DONE;
    into->depth++;
    if (type == &PyTuple_Type) {
        done = PyTuple_GET_SIZE(value) ? check_first(into, value) : DONE;
        if (done == DONE)
            done = add_items(into, TUPLE, value);
    } else if ((PyObject *)type == library.size_type) {
        done = add_size(into, value);
    } else if (type == &PyFrozenSet_Type) {
        done = PySet_GET_SIZE(value) ? check_first(into, value) : DONE;
        if (done == DONE)
            done = add_set(into, FROZENSET, value);
    } else {
        done = add_if_again(into, value, &is_again);
        if (done == DONE && !is_again)
            done = type == &PyList_Type  ? add_items(into, LIST, value)
                   : type == &PySet_Type ? add_set(into, SET, value)
                   : type == &PyDict_Type ? add_dictionary(into, value)
                                          : add_ordered(into, value);
    }
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
        type == &PySet_Type || type == &PyFrozenSet_Type || type == &PyODict_Type ||
        (PyObject *)type == library.size_type)
        return add_container(into, value);
    if (type == &PyComplex_Type) {
        Py_complex number = PyComplex_AsCComplex(value);
        double parts[2] = {number.real, number.imag};
        return add_tag(into, COMPLEX) || buffer_add(&into->out, parts, 16) ? FAILED : DONE;
    }
    return add_other(into, value);
}

/* encode_values(value, tensors, name_of, home_of) -> bytes, or None where it has to give up. */
PyObject *values_encode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4 || !PyList_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "encode_values takes a value, a list, two functions");
        return NULL;
    }
    encoder into = {.tensors = arguments[1], .name_of = arguments[2], .home_of = arguments[3]};
    buffer_init(&into.out);
    numbering_init(&into.tensor_numbers);
    numbering_init(&into.containers);
    numbering_init(&into.repeatable);
    outcome done = add(&into, arguments[0]);
    PyObject *made = done == DONE ? PyBytes_FromStringAndSize((char *)into.out.data,
                                                              (Py_ssize_t)into.out.size)
                     : done == BEYOND ? Py_NewRef(Py_None)
                                      : NULL;
    buffer_free(&into.out);
    numbering_free(&into.tensor_numbers);
    numbering_free(&into.containers);
    numbering_free(&into.repeatable);
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

static PyObject *read_list(decoder *from)
{
    Py_ssize_t count;
    if (read_count(from, 1, &count))
        return NULL;
    PyObject *made = PyList_New(0);
    if (made == NULL || keep(from, made))
        goto failed;
    while (count-- > 0) {
        PyObject *value = read_value(from);
        if (value == NULL)
            goto failed;
        int is_failed = PyList_Append(made, value);
        Py_DECREF(value);
        if (is_failed)
            goto failed;
    }
    return made;
failed:
    Py_XDECREF(made);
    return NULL;
}

/* A set refers back to itself only through a value that cannot be hashed. */
static PyObject *read_set(decoder *from, bool is_frozen)
{
    Py_ssize_t count;
    if (read_count(from, 1, &count))
        return NULL;
    PyObject *made = is_frozen ? PyFrozenSet_New(NULL) : PySet_New(NULL);
    if (made == NULL || (!is_frozen && keep(from, made)))
        goto failed;
    while (count-- > 0) {
        PyObject *value = read_value(from);
        if (value == NULL)
            goto failed;
        int is_failed = PySet_Add(made, value);
        Py_DECREF(value);
        if (is_failed)
            goto failed;
    }
    return made;
failed:
    Py_XDECREF(made);
    return NULL;
}

static PyObject *read_dictionary(decoder *from, bool is_ordered)
{
    Py_ssize_t count;
    if (read_count(from, 2, &count))
        return NULL;
    PyObject *made = is_ordered ? PyObject_CallNoArgs(ordered_dict) : PyDict_New();
    if (made == NULL || keep(from, made))
        goto failed;
    while (count-- > 0) {
        PyObject *value = NULL, *key = read_value(from);
        if (key != NULL)
            value = read_value(from);
        int is_failed = value == NULL || PyObject_SetItem(made, key, value);
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (is_failed)
            goto failed;
    }
    return made;
failed:
    Py_XDECREF(made);
    return NULL;
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

static PyObject *read_big_integer(decoder *from)
{
    PyObject *made = NULL, *bytes = read_bytes(from);
    if (bytes == NULL)
        return NULL;
    PyObject *method = PyObject_GetAttr((PyObject *)&PyLong_Type, name_from_bytes);
    PyObject *args = Py_BuildValue("(Os)", bytes, "little");
    PyObject *kwargs = Py_BuildValue("{sO}", "signed", Py_True);
    if (method && args && kwargs)
        made = PyObject_Call(method, args, kwargs);
    Py_DECREF(bytes);
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return made;
}

static PyObject *read_home(decoder *from)
{
    long long numbers[3];
    if (reader_take(&from->in, numbers, 24))
        return cut_short();
    PyObject *address = PyObject_CallFunction(reference_type, "LLL", numbers[0], numbers[1],
                                              numbers[2]);
    if (address == NULL)
        return NULL;
    PyObject *reference = PyObject_CallOneArg(from->come_home, address);
    Py_DECREF(address);
    return reference;
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
        return read_big_integer(from);
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
        return read_list(from);
    case SET:
        return read_set(from, false);
    case FROZENSET:
        return read_set(from, true);
    case DICTIONARY:
        return read_dictionary(from, false);
    case ORDERED:
        first = read_dictionary(from, true);
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
        first = read_bytes(from);
        if (first == NULL)
            return NULL;
        PyObject *found = PyObject_CallOneArg(from->resolve, first);
        Py_DECREF(first);
        return found;
    case MADE:
        first = read_text(from);
        return rebuilt(tag, first, first == NULL ? NULL : read_value(from));
    case HOME:
        return read_home(from);
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
