/* The module torchweft._native: the fast twins of the codec and of links. torchweft/native.py chooses it. */
#include "link.h"

library_parts library;

/* Finds the table of functions of a tensor class, of version 1; returns 0, or -1. */
static int find_dlpack(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL)
        return -1;
    const dlpack_header *header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* The table is static, says the specification. */
    while (header != NULL && header->version.major != 1)
        header = header->previous;
    if (header == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError, "torch offers no table of DLPack 1");
        return -1;
    }
    library.dlpack = (const dlpack_api *)header;
    return 0;
}

/* Keeps an attribute of a module in `into`; returns 0, or -1 with an exception. */
static int keep(const char *module, const char *name, PyObject **into)
{
    PyObject *from = PyImport_ImportModule(module);
    if (from == NULL)
        return -1;
    *into = PyObject_GetAttrString(from, name);
    Py_DECREF(from);
    return *into == NULL ? -1 : 0;
}

static int find_parts(void)
{
    if (keep("torch", "Tensor", &library.tensor_type) ||
        keep("torch.nn", "Parameter", &library.parameter_type) ||
        keep("torch", "strided", &library.strided_layout) ||
        keep("torchweft.engine.wire.frames", "Frame", &library.frame_type) ||
        keep("torchweft.engine.wire.messages", "decode_call", &library.decode_call) ||
        keep("collections", "OrderedDict", &library.ordered_dict))
        return -1;
    return find_dlpack(library.tensor_type);
}

static PyMethodDef methods[] = {
    {"set_dtype", tensors_set_dtype, METH_VARARGS, "Takes a dtype; called once for each."},
    {"set_value_parts", values_set_parts, METH_VARARGS, "Takes what values need; called once."},
    {"encode_tensors", tensors_encode, METH_O, "Returns small tensors as bytes, or None."},
    {"decode_tensors", (PyCFunction)(void (*)(void))tensors_decode, METH_FASTCALL,
     "Returns the tensors in a message, and their flags."},
    {"decode_call", serve_decode_call, METH_O, "Returns the head of a call."},
    {"decode_message", serve_decode_message, METH_VARARGS, "Returns a value, or NotImplemented."},
    {"encode_result", serve_encode_result, METH_VARARGS, "Returns a reply, or None."},
    {"encode_values", (PyCFunction)(void (*)(void))values_encode, METH_FASTCALL,
     "Returns a value as bytes, or None."},
    {"decode_values", (PyCFunction)(void (*)(void))values_decode, METH_FASTCALL,
     "Returns the value of bytes."},
    {"set_modes", call_set_modes, METH_O, "Takes what tells of torch's modes; called once."},
    {"encode_call", (PyCFunction)(void (*)(void))call_encode, METH_FASTCALL,
     "Returns a call as a frame, or None."},
    {"decode_reply", call_decode_reply, METH_O, "Returns the head of a reply, or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "torchweft._native",
    .m_doc = "The fast twins of the codec of values and small tensors, and of links.",
    .m_size = -1, /* One interpreter: torch has no others either. */
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (find_parts() || tensors_init())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL &&
        (PyModule_AddType(module, &link_type) || PyModule_AddType(module, &lease_type)))
        Py_CLEAR(module);
    return module;
}
