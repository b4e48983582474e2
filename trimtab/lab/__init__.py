# SPDX-License-Identifier: Apache-2.0
"""The lab: a small decoder, text, fault windows and a trainer, to see the controller at work."""
