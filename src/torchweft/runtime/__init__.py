"""Threads, events, queues and timers of a worker. Nothing here knows of workers or messages.

====================  ============================================================================
module                contents
====================  ============================================================================
``reactor``           the threads that wait for events and run tasks
``fair_queue``        the tasks that wait, by sender, served in turn
``timers``            the thread that calls jobs when they are due
``reactor_checks``    timer jobs for the reactor: stalled tasks, connections left unarmed
``transfer_loop``     the threads that move large tensors
``interrupts``        which thread may be interrupted by Ctrl-C, and what is safe there
``thread_modes``      the PyTorch modes that a task leaves on its thread
``exception_log``     logging of the program's exceptions, which must not end a thread
``long_waits``        messages about waits that take long
``switch_interval``   how soon a waiting thread gets the interpreter lock
``openmp``            keeps idle OpenMP threads from spinning
====================  ============================================================================
"""
