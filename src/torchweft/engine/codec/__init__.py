"""Serializes objects and tensors to bytes, and back.

A message is a value or a pickle with all tensors taken out of it, and the tensors. The memory of
small tensors is in the message, and that of large ones beside it. This is the lowest layer that may
import torch.

==================  ===============================================================
``objects``         an object to a payload, its tensors and its external references
``reducers``        how the objects of torch and numpy are taken apart
``by_value``        functions and classes that the receiver cannot import
``diagnosis``       which part of an object cannot be sent, and what to do about it
``functions``       callables by name
``tensors``         tensors to descriptions and their memory, and back without a copy
``values``          values of a closed list of kinds to bytes without pickle, and back within bounds
``reading``         how a worker reads messages: anything, allowed names only, or plain values
``registry``        the names that a message may follow on every worker, or on a strict one
``exceptions``      errors, with their cause and the remote traceback
``tracebacks``      the frames of the program alone, for each worker once
==================  ===============================================================
"""
