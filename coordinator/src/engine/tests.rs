mod bytes;
mod faults;
mod requests;
