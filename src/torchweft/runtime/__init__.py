"""Threads, events, queues and time: what every worker runs on. It knows no worker and no message.

====================  ============================================================================
module                contents
====================  ============================================================================
``reactor``           the threads that wait for events and run tasks
``fair_queue``        the tasks that wait, by sender, served in turn
``timers``            the thread that calls what is due
``reactor_checks``    what the timers do for the reactor: stalled tasks, connections left unarmed
``transfer_loop``     the threads that move large tensors
``interrupts``        which thread may be interrupted by Ctrl-C, and what is safe there
``thread_modes``      the modes of PyTorch that a task leaves on its thread
``exception_log``     logging of exceptions of the program, which must not end a thread
``long_waits``        messages about waits that take long
``switch_interval``   how soon a waiting thread gets the interpreter lock
``openmp``            idle threads of OpenMP that are to sleep
====================  ============================================================================
"""
