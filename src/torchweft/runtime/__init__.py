"""Threads, events, queues and timers of a worker. Nothing here knows of workers or messages.

module                contents
====================  ============================================================================
``reactor``           the threads that wait for events and run tasks
``fair_queue``        the tasks that wait, by sender, served in turn
``timers``            the thread that calls jobs when they are due; its jobs for the reactor
``transfer_loop``     the threads that move large tensors
``interrupts``        which thread may be interrupted by Ctrl-C, and what is safe there
``thread_modes``      the PyTorch modes that a task leaves on its thread
``events``            the last rare events, to find the cause of a problem
``reports``           log messages: exceptions of the program, and waits that take long
``standard_streams``  standard streams that are closed or missing
``log_records``       the worker and the call of each log record
``stacks``            the stacks of all threads
``contention``        how soon a waiting thread gets the interpreter lock; idle OpenMP threads
                         that do not spin
====================  ============================================================================
=======
=======================  =========================================================================
module                   contents
=======================  =========================================================================
``reactor``              the threads that wait for events and run tasks
``fair_queue``           the tasks that wait, by sender, served in turn
``timers``               the thread that calls jobs when they are due; its jobs for the reactor
``transfer_loop``        the threads that move large tensors
``interrupts``           which thread may be interrupted by Ctrl-C, and what is safe there
``repeated_interrupts``  an interrupt that a finalizer swallows comes again
``thread_modes``         the PyTorch modes that a task leaves on its thread
``events``               the last rare events, to find the cause of a problem
``reports``              log messages: exceptions of the program, and waits that take long
``standard_streams``     standard streams that are closed or missing
``log_records``          the worker and the call of each log record
``stacks``               the stacks of all threads
``contention``           how soon a waiting thread gets the interpreter lock
=======================  =========================================================================
"""
