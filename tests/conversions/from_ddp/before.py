"""Handwritten digits under DistributedDataParallel: torchrun --nproc-per-node 2 before.py"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, TRAINING = 100, 10, 1500


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):
        return self.layers(image)


def digits(training):
    images, labels = load_digits(return_X_y=True)
    part = slice(0, TRAINING) if training else slice(TRAINING, None)
    return TensorDataset(torch.tensor(images[part] / 16, dtype=torch.float32), torch.tensor(labels[part]))


def evaluate(model, device):
    model.eval()
    right, loss, samples = 0, 0.0, 0
    with torch.no_grad():
        for image, label in DataLoader(digits(training=False), batch_size=BATCH):
            image, label = image.to(device), label.to(device)
            output = model(image)
            loss += F.cross_entropy(output, label, reduction="sum").item()
            right += (output.argmax(1) == label).sum().item()
            samples += len(label)
    model.train()
    return right / samples, loss / samples


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device), device_ids=[device.index] if cuda else None)
    data = digits(training=True)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for image, label in loader:
            image, label = image.to(device), label.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), label)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item() / world_size:.4f}")

    if rank == 0:
        accuracy, loss = evaluate(model.module, device)
        print(f"accuracy {accuracy:.6f} loss {loss:.6f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()  # none leaves while another is still at it
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads let go of tensors; an interpreter that ends meanwhile aborts


if __name__ == "__main__":
    main()
