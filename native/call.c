/* A call as bytes: the head and the values in one frame; the plain twin is `plain_frame` in
 * torchweft/rpc/encoding.py, and the layout of the head is in wire/messages.py. */
#include "native.h"


enum { FRAME_HEADER_BYTES = 16, MODES = 4 };
/* The same limit as in messages.py. */
static const size_t PAYLOAD_LIMIT_BYTES = (size_t)31 << 26;

typedef struct {
    double remaining_s;
    int64_t creation;
    uint64_t context_id, message_id;
    uint16_t name_bytes, span_bytes;
    uint32_t code_bytes, reference_count, payload_bytes;
} call_head;
_Static_assert(sizeof(call_head) == 48, "the head of a call has no gaps");

/* Functions of torch that return something true where operations do not do what they say. */
static PyObject *modes[MODES];

int call_init(void)
{
    static const char *const names[MODES][2] = {
        {"torch._C", "_len_torch_dispatch_stack"},
        {"torch._C", "_len_torch_function_stack"},
        {"torch._C._functorch", "maybe_current_level"},
        {"torch._C", "_get_tracing_state"},
    };
    for (int index = 0; index < MODES; index++)
        if (library_keep(names[index][0], names[index][1], &modes[index]))
            return -1;
    return 0;
}

/* Returns BEYOND in torch's modes and transforms, and while torch traces. */
static outcome check_modes(void)
{
    for (int index = 0; index < MODES; index++) {
        PyObject *found = PyObject_CallNoArgs(modes[index]);
        int is_true = found == NULL ? -1 : PyObject_IsTrue(found);
        Py_XDECREF(found);
        if (is_true)
            return is_true < 0 ? FAILED : BEYOND;
    }
    return DONE;
}

/* Adds the texts behind the head, and the values; sets the sizes in the head. */
static outcome add_content(buffer *out, call_head *head, PyObject *const *texts,
                           PyObject *const *values)
{
    size_t sizes[3];
    for (int index = 0; index < 3; index++) {
        sizes[index] = (size_t)PyBytes_GET_SIZE(texts[index]);
        if (sizes[index] > (index < 2 ? UINT16_MAX : PAYLOAD_LIMIT_BYTES))
            return BEYOND;
        if (buffer_add(out, PyBytes_AS_STRING(texts[index]), sizes[index]))
            return FAILED;
    }
    size_t begin = out->size;
    outcome done = values_add(out, values[0], values[1], values[2], values[3]);
    size_t payload_bytes = out->size - begin;
    if (done == DONE && payload_bytes + sizes[2] > PAYLOAD_LIMIT_BYTES)
        return BEYOND;
    head->name_bytes = (uint16_t)sizes[0];
    head->span_bytes = (uint16_t)sizes[1];
    head->code_bytes = (uint32_t)sizes[2];
    head->payload_bytes = (uint32_t)payload_bytes;
    return done;
}

/* encode_call(timeout_s, creation, name, span, code, values, tensors, main_by_name, home_of, inlines):
 * returns a frame without its header and the numbers of its graph, and whether a tensor requires
 * grad, None if the tensors do not stand in it; or None where it has to give up. */
PyObject *call_encode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 10 || !PyBytes_Check(arguments[2]) || !PyBytes_Check(arguments[3]) ||
        !PyBytes_Check(arguments[4]) || !PyList_CheckExact(arguments[6]))
        return PyErr_Format(PyExc_TypeError, "encode_call takes ten arguments");
    call_head head = {.remaining_s = PyFloat_AsDouble(arguments[0]),
                      .creation = PyLong_AsLongLong(arguments[1])};
    if (PyErr_Occurred())
        return NULL;
    buffer out;
    buffer_init(&out);
    unsigned char *begin = buffer_extend(&out, FRAME_HEADER_BYTES + sizeof head);
    outcome done = FAILED;
    if (begin != NULL) {
        memset(begin, 0, FRAME_HEADER_BYTES);
        done = add_content(&out, &head, arguments + 2, arguments + 5);
        memcpy(out.data + FRAME_HEADER_BYTES, &head, sizeof head);
    }
    PyObject *tensors = arguments[6], *grad = Py_False, *made = NULL;
    if (done == DONE && PyList_GET_SIZE(tensors) && (done = check_modes()) == DONE) {
        bool requires_grad = false;
        outcome added = arguments[9] == Py_True ? tensors_add(&out, tensors, &requires_grad) : BEYOND;
        if (added == FAILED)
            done = FAILED;
        else
            grad = added == BEYOND ? Py_None : requires_grad ? Py_True : Py_False;
    }
    if (done == DONE)
        made = Py_BuildValue(
            "NO", PyByteArray_FromStringAndSize((char *)out.data, (Py_ssize_t)out.size), grad);
    else if (done == BEYOND)
        made = Py_NewRef(Py_None);
    buffer_free(&out);
    return made;
}
