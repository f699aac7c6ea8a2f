"""Handwritten digits with Lightning on two devices: python before.py"""

import pytorch_lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, TRAINING, DEVICES = 100, 10, 1500, 2


def digits(training):
    images, labels = load_digits(return_X_y=True)
    part = slice(0, TRAINING) if training else slice(TRAINING, None)
    return TensorDataset(torch.tensor(images[part] / 16, dtype=torch.float32), torch.tensor(labels[part]))


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):
        return self.layers(image)

    def training_step(self, batch, batch_idx):
        image, label = batch
        loss = F.cross_entropy(self(image), label)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch, batch_idx):
        image, label = batch
        output = self(image)
        accuracy = (output.argmax(1) == label).float().mean()
        self.log("loss", F.cross_entropy(output, label), batch_size=len(label))
        self.log("accuracy", accuracy, batch_size=len(label))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DigitsData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(digits(training=True), batch_size=BATCH // DEVICES, shuffle=True)

    def test_dataloader(self):
        return DataLoader(digits(training=False), batch_size=BATCH)


def main():
    L.seed_everything(0)
    model, data = Digits(), DigitsData()
    trainer = L.Trainer(
        devices=DEVICES,
        strategy="ddp",
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "model.pt")
        # on one device: a distributed sampler would count a sample twice to make the shares equal
        tester = L.Trainer(devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        (result,) = tester.test(model, data, verbose=False)
        print(f"accuracy {result['accuracy']:.6f} loss {result['loss']:.6f}")


if __name__ == "__main__":
    main()
