"""The same gradients in every way: in one process, in a context, returned, and into ``.grad``."""

import json

import torch
import torch.nn as nn
import torch.optim as optim

import torchweft.autograd as dist_autograd
import torchweft.mapreduce as todist
import torchweft.mapreduce as torchopt
import torchweft.rpc as rpc

lr = 0.1
data = batch = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))


def build_model():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def compute_loss(model, batch):
    loss = model(batch).pow(2).mean()
    return loss


def told(tensors):
    return [tensor.tolist() for tensor in tensors]


def grad_in_one_process():
    model = build_model()
    loss = compute_loss(model, data)

    params = tuple(model.parameters())
    grads = torch.autograd.grad(loss, params)
    return told(grads)


def step_in_one_process():
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=lr)
    loss = compute_loss(model, data)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return told(model.parameters())


def gradients_of_a_context():
    model = build_model()
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", compute_loss, args=(model, data))

        dist_autograd.backward(context_id, [loss])

        grad_dict = dist_autograd.get_gradients(context_id)
    return told(grad_dict[param] for param in model.parameters())


def gradients_of_a_parameter():
    def compute_loss(param):
        return param.mean()

    param = torch.nn.Parameter(torch.randn(2, 2), requires_grad=True)

    with dist_autograd.context() as context_id:
        loss1 = rpc.rpc_sync("worker1", compute_loss, args=(param,))

        loss2 = rpc.rpc_sync("worker1", compute_loss, args=(param.clone(),))
        return gradients_of_both(context_id, loss1, loss2, param)


def gradients_of_a_module():
    model = nn.Linear(2, 2)
    tuple(model.parameters())

    cloned_model = torchopt.module_clone(model, by="clone")
    tuple(cloned_model.parameters())

    with dist_autograd.context() as context_id:
        loss1 = rpc.rpc_sync("worker1", compute_loss, args=(model, batch))

        loss2 = rpc.rpc_sync("worker1", compute_loss, args=(cloned_model, batch))
        kinds = [type(each).__name__ for each in cloned_model.parameters()]
        return kinds, gradients_of_both(context_id, loss1, loss2, model.weight)


def gradients_of_both(context_id, loss1, loss2, tensor):
    """Of the first loss, which PyTorch would have cut off from the tensor, and of the second."""
    return told(dist_autograd.grad(context_id, loss, tensor)[0] for loss in (loss1, loss2))


def compute_loss_remotely(model):
    return todist.remote_sync_call(compute_loss, args=(model, data), reducer=todist.mean_reducer)


def returned_gradients():
    model = build_model()

    with todist.autograd.context() as context_id:
        loss = compute_loss_remotely(model)

        grads = todist.autograd.grad(context_id, loss, model.parameters())
    return told(grads)


def step_with_workers():
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    with todist.autograd.context() as context_id:
        loss = compute_loss_remotely(model)

        optimizer.zero_grad()
        todist.autograd.backward(context_id, loss)
        optimizer.step()
    return told(model.parameters())


@todist.auto_init_rpc()
@todist.rank_zero_only
def main():
    ways = (
        *(grad_in_one_process, gradients_of_a_context, returned_gradients),
        *(step_in_one_process, step_with_workers),
        *(gradients_of_a_parameter, gradients_of_a_module),
    )
    print(json.dumps({"program": "differentiating", **{way.__name__: way() for way in ways}}))


if __name__ == "__main__":
    main()
