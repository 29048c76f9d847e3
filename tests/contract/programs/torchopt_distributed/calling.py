"""Workers join with a device of their own, and call one of them: waiting, later, and recorded."""

import argparse
import json

import without_gpu

import torchweft.autograd as dist_autograd
import torchweft.mapreduce as todist
import torchweft.rpc as rpc

torch = without_gpu.TorchOnCpu()


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return args


def worker_init_fn():
    local_rank = todist.get_local_rank()
    torch.cuda.set_device(local_rank)


def my_add(t1, t2):
    return torch.add(t1, t2)


def func(arg1, arg2, kwarg):
    return [todist.get_rank(), arg1 + arg2 * kwarg]


@todist.rank_zero_only
def add_remotely():
    with dist_autograd.context() as context_id:
        t1 = torch.rand((3, 3), requires_grad=True)
        t2 = torch.rand((3, 3), requires_grad=True)

        t3 = rpc.rpc_sync("worker1", my_add, args=(t1, t2))

        t4 = torch.rand((3, 3), requires_grad=True)
        t5 = torch.mul(t3, t4)

        loss = t5.sum()

        dist_autograd.backward(context_id, [loss])

        dist_autograd.get_gradients(context_id)
        gradients = dist_autograd.get_gradients(context_id)
        return [gradients[tensor].tolist() for tensor in (t1, t2, t4)]


def call_without_waiting(arg1, arg2, worker_id):
    future = todist.remote_async_call(
        func,
        args=(arg1, arg2),
        kwargs={"kwarg": 10},
        partitioner=worker_id,
    )
    result = future.wait()
    return result


@todist.auto_init_rpc(worker_init_fn)
def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    arg1, arg2 = todist.get_rank(), 2
    worker_id = todist.get_worker_id("worker1")
    result = todist.remote_sync_call(
        func,
        args=(arg1, arg2),
        kwargs={"kwarg": 10},
        partitioner=worker_id,
    )
    answer = {"program": "calling", "rank": todist.get_rank(), "waited": result}
    answer["later"] = call_without_waiting(arg1, arg2, worker_id)
    answer["gradients"] = add_remotely()
    answer["devices"] = torch.asked_for
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
