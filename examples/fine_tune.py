"""Fine-tune a language model with TRL's SFTTrainer and LoRA, within a memory budget.

    pip install "recollect[plan,trl]"
    python examples/fine_tune.py                     the smallest peak that a plan can reach
    python examples/fine_tune.py --budget 200MiB     as fast as that budget allows

The model is a small Qwen3 with random weights and the data is made up, so nothing is downloaded. For a real run, pass
`model="Qwen/Qwen3-8B"` and your own data to the trainer; the callback stays the same.
"""

import argparse
import tempfile

import torch

from recollect.integrations.transformers import RecollectCallback

try:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
except ImportError as error:
    message = f'this example needs trl and peft, which cannot be imported ({error}): pip install "recollect[trl]"'
    raise SystemExit(message) from error
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

SENTENCES = ["the small cat sees a green bird and the bird sings", "a dog follows the old cat and sleeps"]
WORDS = ["<pad>", "<eos>", *sorted({word for sentence in SENTENCES for word in sentence.split()})]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="min", help="the most that a step may take: 200MiB, 80%%, or min")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    callback = RecollectCallback(budget=args.budget)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=make_model(args.layers),
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=8,
                learning_rate=1e-2,
                bf16=False,
                gradient_checkpointing=False,  # TRL's default is True; the callback would turn it off
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"text": SENTENCES * 16}),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
            callbacks=[callback, ShowPlan(callback)],
        )
        trainer.train()


class ShowPlan(TrainerCallback):
    """Prints what the callback before it did."""

    def __init__(self, callback: RecollectCallback) -> None:
        self._callback = callback

    def on_train_begin(self, *args: object, **given: object) -> None:
        print(self._callback.handle)


if __name__ == "__main__":
    main()
