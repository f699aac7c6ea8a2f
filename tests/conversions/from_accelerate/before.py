"""Handwritten digits with Accelerate: accelerate launch before.py, or torchrun --nproc-per-node 2 before.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

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


def evaluate(accelerator, model, loader):
    model.eval()
    right, loss, samples = 0, 0.0, 0
    for image, label in loader:
        with torch.no_grad():
            output = model(image)
        output, label = accelerator.gather_for_metrics((output, label))
        loss += F.cross_entropy(output, label, reduction="sum").item()
        right += (output.argmax(1) == label).sum().item()
        samples += len(label)
    model.train()
    return right / samples, loss / samples


def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = Net()
    each = BATCH // accelerator.num_processes
    loader = DataLoader(digits(training=True), batch_size=each, shuffle=True)
    held_out = DataLoader(digits(training=False), batch_size=each)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))  # stepped once a process
    prepared = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    model, optimizer, loader, held_out, scheduler = prepared

    for epoch in range(EPOCHS):
        for image, label in loader:
            loss = F.cross_entropy(model(image), label)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss.detach()).mean().item():.4f}")

    accuracy, loss = evaluate(accelerator, model, held_out)
    accelerator.print(f"accuracy {accuracy:.6f} loss {loss:.6f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
