"""Serializes objects and tensors to bytes, and back.

A message is a value or a pickle with all tensors taken out of it, and the tensors. Small tensors
are in it with their memory. Large ones are described by a table, with their memory beside the
message. This is the lowest layer that may import torch.

==================  ===============================================================
``objects``         an object to a payload, its tensors and its external references
``reducers``        how the objects of torch are taken apart
``value_pickling``  functions and classes that the receiver cannot import
``diagnosis``       which part of an object cannot be sent, and what to do about it
``functions``       callables by name, or taken apart
``tensors``         tensors to a table and buffers, and back without a copy
``table``           the bytes of that table, the numbers of dtypes and devices, and the checks
                    before memory is touched
``inline``          small tensors to bytes inside their message
``values``          values of a closed list of kinds to bytes, without pickle
``value_reading``   such bytes to values, within bounds
``reading``         how a worker reads messages: anything, allowed names only, or plain values
``allowed``         an allow-list of modules
``registry``        the names that a message may follow on every worker, or on a strict one
``exceptions``      errors, with their cause and the remote traceback
``tracebacks``      the frames of the program alone, for each worker once
==================  ===============================================================
"""
