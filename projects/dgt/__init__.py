"""DGT: text classification by differential gated transformers, beside vanilla and differential ones."""
