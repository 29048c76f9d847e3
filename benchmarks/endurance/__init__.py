"""A million calls and thousands of autograd contexts: does anything grow?"""
