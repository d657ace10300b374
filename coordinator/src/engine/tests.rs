mod bytes;
mod faults;
mod hints;
mod requests;
mod rescue;
mod resume;
