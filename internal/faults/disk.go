package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrNeedsRoot says that a fault cannot be had here: only root may mount.
var ErrNeedsRoot = errors.New("it needs root, to mount a small file system (tmpfs)")

// Disk is a small file system of its own, which can be filled.
type Disk struct {
	Dir     string
	ballast string
}

// MountDisk mounts a file system of so many bytes at dir, an empty folder. It
// fails with ErrNeedsRoot where that is not allowed.
func MountDisk(dir string, bytes int64) (*Disk, error) {
	err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, fmt.Sprintf("size=%d,mode=0700", bytes))
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		return nil, fmt.Errorf("mount a small disk: %w", ErrNeedsRoot)
	}
	if err != nil {
		return nil, fmt.Errorf("mount a small disk at %s: %w", dir, err)
	}
	return &Disk{Dir: dir, ballast: filepath.Join(dir, "ballast")}, nil
}

// CanMount says whether small disks can be had here: whether this is root, and one
// that may mount.
func CanMount() bool {
	dir, err := os.MkdirTemp("", "onceledger-mount-")
	if err != nil {
		return false
	}
	defer os.Remove(dir) //nolint:errcheck // empty
	disk, err := MountDisk(dir, 1<<20)
	return err == nil && disk.Unmount() == nil
}

// Fill takes all the room that is left, and says how much it was.
func (d *Disk) Fill() (bytes int64, err error) {
	file, err := os.OpenFile(d.ballast, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 0, fmt.Errorf("fill the disk: %w", err)
	}
	defer file.Close()
	for size := 64 << 10; size > 0; size /= 2 {
		block := make([]byte, size)
		for {
			n, err := file.Write(block)
			bytes += int64(n)
			if errors.Is(err, syscall.ENOSPC) {
				break
			}
			if err != nil {
				return bytes, fmt.Errorf("fill the disk: %w", err)
			}
		}
	}
	return bytes, nil
}

// Clear gives the room back.
func (d *Disk) Clear() error {
	if err := os.Remove(d.ballast); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("clear the disk: %w", err)
	}
	return nil
}

// Unmount takes the disk away, with all that is on it, also while somebody still
// has a file of it open.
func (d *Disk) Unmount() error {
	if err := syscall.Unmount(d.Dir, syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the small disk: %w", err)
	}
	return nil
}

// SmallDisk is a disk that holds some tables of a database.
type SmallDisk struct {
	*Disk
	owner  *pgxpool.Pool
	tables []string
}

// tablespace is where a SmallDisk's tables lie.
const tablespace = "fault_small_disk"

// MoveToSmallDisk puts tables (and partitions) of a server on this machine onto a
// disk of their own that is mounted at dir, an empty folder which the server may
// reach. Their rows stay; who writes to them waits meanwhile.
func MoveToSmallDisk(ctx context.Context, owner *pgxpool.Pool, dir string, bytes int64, tables ...string) (_ *SmallDisk, err error) {
	disk, err := MountDisk(dir, bytes)
	if err != nil {
		return nil, err
	}
	s := &SmallDisk{Disk: disk, owner: owner, tables: tables}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.MoveBack(context.WithoutCancel(ctx)))
		}
	}()
	var data string
	if err := owner.QueryRow(ctx, "SHOW data_directory").Scan(&data); err != nil {
		return nil, fmt.Errorf("ask for the server's folder: %w", err)
	}
	info, err := os.Stat(data)
	if err != nil {
		return nil, fmt.Errorf("look at the server's folder, which is to be on this machine: %w", err)
	}
	server := info.Sys().(*syscall.Stat_t)
	if err := os.Chown(dir, int(server.Uid), int(server.Gid)); err != nil {
		return nil, fmt.Errorf("give the small disk to the server: %w", err)
	}
	if _, err := owner.Exec(ctx, "CREATE TABLESPACE "+tablespace+" LOCATION '"+dir+"'"); err != nil {
		return nil, fmt.Errorf("make a tablespace on the small disk: %w", err)
	}
	return s, s.move(ctx, tablespace)
}

func (s *SmallDisk) move(ctx context.Context, to string) error {
	for _, table := range s.tables {
		if _, err := s.owner.Exec(ctx, "ALTER TABLE public."+pgx.Identifier{table}.Sanitize()+" SET TABLESPACE "+to); err != nil {
			return fmt.Errorf("move %s to %s: %w", table, to, err)
		}
	}
	return nil
}

// MoveBack puts the tables back to where they were and takes the disk away.
func (s *SmallDisk) MoveBack(ctx context.Context) error {
	if err := errors.Join(s.Clear(), s.move(ctx, "pg_default")); err != nil {
		return err
	}
	if _, err := s.owner.Exec(ctx, "DROP TABLESPACE IF EXISTS "+tablespace); err != nil {
		return fmt.Errorf("drop the tablespace: %w", err)
	}
	return s.Unmount()
}

// DiskAt is a small file system that somebody else has mounted.
func DiskAt(dir string) *Disk { return &Disk{Dir: dir, ballast: filepath.Join(dir, "ballast")} }
