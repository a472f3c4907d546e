# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14. Where the textbook bends
#
# PPO was made for another world: rewards at every step, a policy that starts from nothing, a batch that is used for many
# passes. A language model has one reward at the end, starts competent, and hardly leaves the policy that sampled. Which
# parts of the algorithm still earn their keep?
#
# Eight parts, one question each. Every part can be read and run alone, after the first two code cells.
#
# 1. Which choices make a published algorithm?
# 2. Is a completion a sequence of decisions, or one? And how often does the clip fire?
# 3. Who needs a critic?
# 4. Which KL, and where?
# 5. What does length do?
# 6. Is an on-policy algorithm on-policy?
# 7. Where does the entropy go?
# 8. Should the ratio be that of a token or of the whole completion?

# %%
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from lmrl.figures.style import COLORS, explore, new_figure, show

# %% [markdown]
# # Part 1. Five choices

# %% [markdown]
# # Part 2. One decision, mostly on-policy

# %% [markdown]
# # Part 3. Who needs a critic?

# %% [markdown]
# # Part 4. Which KL, and where?

# %% [markdown]
# # Part 5. What length does

# %% [markdown]
# # Part 6. On-policy in name

# %% [markdown]
# # Part 7. Entropy is spent

# %% [markdown]
# # Part 8. The granularity of the ratio
