"""Threads of a worker, and what belongs to a thread. Nothing here knows of workers or messages.

==================  ===========================================================================
module              contents
==================  ===========================================================================
``reactor``         the threads that wait for events and run tasks; the queue of waiting tasks
``timers``          the thread that calls jobs when they are due; its jobs for the reactor
``interrupts``      which thread Ctrl-C may interrupt, and what is safe there; stacks
``thread_modes``    the PyTorch modes that a task leaves on its thread
``device_streams``  the order of GPU work between threads; the streams on which tasks run
``reports``         log messages, their origin, waits that take long, rare events
==================  ===========================================================================
"""
