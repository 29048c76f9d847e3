/* The module torchweft._native: the fast twins of the codec and of links. torchweft/native.py chooses it. */
#include "link.h"

library_parts library;
PyObject *names[NAME_COUNT];

PyObject *take_error(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Finds the table of functions of a tensor class, of version 1; returns 0, or -1. */
static int find_dlpack(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL)
        return -1;
    library.dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* The table is static, says the specification. */
    if (library.dlpack != NULL && library.dlpack->version.major == 1)
        return 0;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ImportError, "torch offers no table of DLPack 1");
    return -1;
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

static const char *const texts[NAME_COUNT] = {
    "answer", "__dict__", "dtype", "frame", "is_conj", "is_leaf", "is_neg",
    "layout", "locked", "requires_grad", "starts",
};

static int make_names(void)
{
    for (int name = 0; name < NAME_COUNT; name++)
        if ((names[name] = PyUnicode_InternFromString(texts[name])) == NULL)
            return -1;
    return 0;
}

static int find_parts(void)
{
    if (keep("torch", "Tensor", &library.tensor_type) ||
        keep("torch.nn", "Parameter", &library.parameter_type) ||
        keep("torch", "strided", &library.strided_layout) ||
        keep("torchweft.engine.wire.frames", "Frame", &library.frame_type) ||
        keep("torchweft.engine.wire.messages", "split_names", &library.split_names) ||
        keep("torchweft.engine.threads.thread_modes", "has_modes", &library.has_modes))
        return -1;
    library.dtype_numbers = PyDict_New();
    return library.dtype_numbers == NULL ? -1 : find_dlpack(library.tensor_type);
}

/* src/torchweft/native.py says what they do. */
static PyMethodDef methods[] = {
    {"set_dtype", tensors_set_dtype, METH_VARARGS, NULL},
    {"set_value_parts", values_set_parts, METH_VARARGS, NULL},
    {"encode_tensors", tensors_encode, METH_O, NULL},
    {"decode_tensors", (PyCFunction)(void (*)(void))tensors_decode, METH_FASTCALL, NULL},
    {"encode_values", (PyCFunction)(void (*)(void))values_encode, METH_FASTCALL, NULL},
    {"decode_values", (PyCFunction)(void (*)(void))values_decode, METH_FASTCALL, NULL},
    {"encode_call", (PyCFunction)(void (*)(void))call_encode, METH_FASTCALL, NULL},
    {"encode_result", call_encode_result, METH_VARARGS, NULL},
    {"decode_answer", call_decode_answer, METH_VARARGS, NULL},
    {"serve_call", (PyCFunction)(void (*)(void))serve_call, METH_FASTCALL, NULL},
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
    if (make_names() || find_parts())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL &&
        (PyModule_AddType(module, &link_type) || PyModule_AddType(module, &lease_type)))
        Py_CLEAR(module);
    return module;
}
