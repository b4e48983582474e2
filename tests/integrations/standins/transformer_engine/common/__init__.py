# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the package of the recipes."""
