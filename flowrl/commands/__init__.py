"""The words after `flowrl`: one class per command, its fields are its flags."""
