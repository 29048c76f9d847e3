"""Runs all programs of this folder, one after the other, in one group of workers."""

import calling
import converting
import differentiating
import maml
import training
import wrapping

import torchweft.mapreduce as todist


@todist.auto_init_rpc()
def main():
    for program in (calling, training, maml, wrapping, differentiating, converting):
        program.main()
        todist.barrier()


if __name__ == "__main__":
    main()
