"""What a teacher is: live, cached, remote, several as one, or with another tokenizer; a file each."""
