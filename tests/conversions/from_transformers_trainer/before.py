"""Which of Python's help texts a paragraph is from, by a small BERT and the Trainer: python before.py"""

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

CLASSES = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "typesmapping")
WORDS, LONGEST, PAD, UNKNOWN, START = 1000, 32, 0, 1, 2


def paragraphs(training):
    every = [(text, label) for label, topic in enumerate(CLASSES) for text in topics[topic].split("\n\n")]
    long = [(re.findall(r"\w+|[^\w\s]", text.lower()), label) for text, label in every if len(text.split()) > 3]
    return [pair for i, pair in enumerate(long) if (i % 5 != 4) == training]


class Paragraphs(torch.utils.data.Dataset):
    def __init__(self, training):
        counts = Counter(word for words, _ in paragraphs(training=True) for word in words)
        self.number = {word: START + 1 + i for i, (word, _) in enumerate(counts.most_common(WORDS))}
        self.paragraphs = paragraphs(training)

    def __len__(self):
        return len(self.paragraphs)

    def __getitem__(self, index):
        words, label = self.paragraphs[index]
        ids = torch.full((LONGEST,), PAD)
        tokens = torch.tensor([START, *(self.number.get(word, UNKNOWN) for word in words)])[:LONGEST]
        ids[: len(tokens)] = tokens
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor(label)}


def model():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=START + 1 + WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LONGEST,
            initializer_range=0.06,
            num_labels=len(CLASSES),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def metrics(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean()}


def main():
    set_seed(0)
    trainer = Trainer(
        model=model(),
        args=TrainingArguments(
            output_dir="trained",
            per_device_train_batch_size=32,
            per_device_eval_batch_size=32,
            num_train_epochs=4,
            learning_rate=2e-3,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            logging_steps=10,
            report_to="none",
            seed=0,
            data_seed=0,
        ),
        train_dataset=Paragraphs(training=True),
        eval_dataset=Paragraphs(training=False),
        compute_metrics=metrics,
    )
    trainer.train()
    result = trainer.evaluate()
    print(f"accuracy {result['eval_accuracy']:.6f} loss {result['eval_loss']:.6f}")
    trainer.save_model("model")


if __name__ == "__main__":
    main()
