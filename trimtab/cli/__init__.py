# SPDX-License-Identifier: Apache-2.0
"""The command line: `main` is its door, and each verb has a file of its own."""
